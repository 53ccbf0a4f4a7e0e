// Names each cell by its column: on narrow screens site.css draws a row as a list of such cells.
// Long names in code may break where a word of them ends.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => {
        cell.dataset.column = names[i] ?? "";
        cell.classList.toggle("empty", !cell.textContent.trim());
      });
    for (const code of table.querySelectorAll("code span"))
      code.replaceChildren(...code.textContent.split(/(?<=[_.,/=(])/).flatMap((part) => [part, document.createElement("wbr")]));
  }
});
