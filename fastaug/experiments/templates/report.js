"use strict";

// A click on a header sorts its table; another click reverses the order. Number columns sort by
// data-value; empty cells come last either way.
function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      headers.forEach((other) => other.setAttribute("aria-sort", "none"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      sortRows(table.tBodies[0], column, header.classList.contains("number"), down ? -1 : 1);
    });
  });
}

function sortRows(body, column, numeric, direction) {
  const words = new Intl.Collator("en", { numeric: true });
  const keyed = [...body.rows].map((row) => {
    const cell = row.cells[column];
    const key = numeric ? parseFloat(cell.dataset.value) : cell.textContent.trim();
    return { row, key, empty: numeric ? Number.isNaN(key) : key === "–" || key === "" };
  });
  keyed.sort((a, b) => {
    if (a.empty || b.empty) return a.empty - b.empty;
    return direction * (numeric ? a.key - b.key : words.compare(a.key, b.key));
  });
  body.append(...keyed.map((one) => one.row));
}

// Shows only rows that contain all words of the input, and only the curves of their runs.
function makeFilter(input) {
  const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const count = input.parentElement.querySelector("output");
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
    });
    const hidden = new Set(rows.filter((row) => row.hidden).map((row) => row.dataset.run));
    document.querySelectorAll(".line[data-run]").forEach((line) => {
      line.classList.toggle("out", hidden.has(line.dataset.run));
    });
    count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  input.addEventListener("input", filter);
  input.parentElement.hidden = false;
  filter();
}

// Highlights a run's row and curves while the pointer is on one of them, and all curves of a style
// while it is on the style's entry in the legend.
function makeHighlights() {
  const parts = [...document.querySelectorAll("[data-run]")];
  const curves = document.querySelector(".overlaid");
  if (!curves) return;
  const onHover = (source, isLit) => {
    source.addEventListener("mouseenter", () => {
      parts.forEach((part) => part.classList.toggle("lit", isLit(part)));
      curves.classList.add("dimmed");
    });
    source.addEventListener("mouseleave", () => {
      parts.forEach((part) => part.classList.remove("lit"));
      curves.classList.remove("dimmed");
    });
  };
  parts.forEach((source) => onHover(source, (part) => part.dataset.run === source.dataset.run));
  document.querySelectorAll("[data-style]").forEach((key) => {
    onHover(key, (part) => part.classList.contains(`line-${key.dataset.style}`));
  });
}

// Opens all folded parts around a link's target.
function reveal(id) {
  const target = document.getElementById(id);
  if (!target) return;
  for (let part = target; part; part = part.parentElement) {
    if (part instanceof HTMLDetailsElement) part.open = true;
  }
  target.scrollIntoView();
}

function revealHash() {
  reveal(decodeURIComponent(location.hash.slice(1)));
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll("input[data-filters]").forEach(makeFilter);
  makeHighlights();
  // There is no hashchange for a link to the current address.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link && link.hash === location.hash) revealHash();
  });
  window.addEventListener("hashchange", revealHash);
  revealHash();
});

// Printing includes folded parts.
let unfolded = [];
window.addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open]):not(.full)")];
  unfolded.forEach((part) => (part.open = true));
});
window.addEventListener("afterprint", () => unfolded.forEach((part) => (part.open = false)));
