// Light, dark, or what the system says. Runs before the page is drawn, so that it does not flash.
(() => {
  const key = "parti-console-theme";
  const root = document.documentElement;
  const apply = (choice) => {
    if (choice === "light" || choice === "dark") root.dataset.theme = choice;
    else delete root.dataset.theme;
  };
  let chosen = "auto";
  try {
    chosen = localStorage.getItem(key) ?? "auto";
  } catch {
    // Storage may be switched off: the choice then lasts as long as the page.
  }
  apply(chosen);
  document.addEventListener("DOMContentLoaded", () => {
    const theme = document.getElementById("theme");
    if (!theme) return;
    for (const input of theme.querySelectorAll("input")) input.checked = input.value === chosen;
    theme.addEventListener("change", (event) => {
      apply(event.target.value);
      try {
        localStorage.setItem(key, event.target.value);
      } catch {
        // As above.
      }
    });
  });
})();
