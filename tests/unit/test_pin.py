"""Being pinned, event by event."""

from __future__ import annotations

from parti.core.pin import Pin, PinChange, PinState


def taken(pin_id: str) -> PinChange:
    return PinChange(True, pin_id, "first message")


def pinned(pin_id: str = "x") -> Pin:
    pin = Pin()
    assert pin.on_message(pin_id) == (taken(pin_id),)
    return pin


def test_the_first_message_with_an_id_pins_and_further_ones_say_nothing_new() -> None:
    pin = Pin()
    assert (pin.state, pin.id) == (PinState.UNPINNED, "")
    assert pin.on_message("") == ()
    assert pin.on_message("x") == (taken("x"),)
    assert pin.on_message("x") == ()
    assert (pin.state, pin.id) == (PinState.PINNED, "x")


def test_a_423_takes_the_pin_that_the_pull_was_sent_with_and_no_other() -> None:
    pin = pinned()
    assert pin.on_status(423, "Nats-Pin-Id mismatch", "older") == ()
    assert pin.on_status(423, "Nats-Pin-Id mismatch", "") == ()
    assert pin.id == "x"
    assert pin.on_status(423, "Nats-Pin-Id mismatch", "x") == (PinChange(False, "x", "423 Nats-Pin-Id mismatch"),)
    assert pin.on_status(423, "Nats-Pin-Id mismatch", "x") == ()
    assert (pin.state, pin.id) == (PinState.UNPINNED, "")


def test_a_pin_does_not_outlive_the_leader_of_its_consumer_or_the_consumer() -> None:
    for text in ("Leadership Change", "Consumer Deleted"):
        pin = pinned()
        assert pin.on_status(409, text, "") == (PinChange(False, "x", f"409 {text}"),)
        assert pin.state is PinState.UNPINNED


def test_other_statuses_leave_it_alone() -> None:
    pin = pinned()
    for code, text in ((100, "Idle Heartbeat"), (408, "Request Timeout"), (409, "Exceeded MaxAckPending"), (404, "")):
        assert pin.on_status(code, text, "x") == ()
    assert pin.state is PinState.PINNED


def test_after_a_reconnect_the_id_is_still_sent_and_the_answer_decides() -> None:
    pin = pinned()
    pin.on_reconnect()
    assert (pin.state, pin.id) == ("unsure", "x")
    assert pin.on_message("x") == ()
    assert pin.state == "pinned"
    pin.on_reconnect()
    assert pin.on_status(423, "Nats-Pin-Id mismatch", "x")
    assert pin.state == "unpinned"
    pin.on_reconnect()
    assert pin.state == "unpinned"


def test_a_pin_that_was_lost_is_not_believed_again_however_late_its_messages_come() -> None:
    pin = pinned()
    pin.on_status(423, "", "x")
    assert pin.on_message("x") == ()
    assert pin.on_message("y") == (taken("y"),)
    assert pin.on_message("x") == ()
    assert pin.id == "y"


def test_another_pin_means_that_the_first_was_lost() -> None:
    pin = pinned()
    assert pin.on_message("y") == (PinChange(False, "x", "another pin was given"), taken("y"))


def test_who_leaves_has_no_pin() -> None:
    pin = pinned()
    assert pin.on_leave() == (PinChange(False, "x", "left"),)
    assert pin.on_leave() == ()
