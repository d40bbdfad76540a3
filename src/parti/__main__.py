"""`python -m parti` is the `parti` command."""

from parti.cli.main import run

if __name__ == "__main__":
    run()
