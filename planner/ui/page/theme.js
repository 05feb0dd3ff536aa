// Runs before the first paint: the page must not flash in the wrong colours.
(() => {
  try {
    const chosen = localStorage.getItem("rfork-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is shut: the system's colours it is.
  }
})();
