"use strict";
// Filters what the page already holds. Nothing is ever parsed as HTML here: cards are shown or hidden, no more.
(() => {
  const cards = [...document.querySelectorAll("main details")];
  const sections = [...document.querySelectorAll("main section")];
  const labels = [...document.querySelectorAll("input[name=label]")];
  const [source, search, count, none] = ["source", "search", "count", "none"].map((id) => document.getElementById(id));
  const texts = new Map(); // the words of a card, gathered at its first search

  function words(card) {
    if (!texts.has(card)) texts.set(card, card.textContent.toLowerCase());
    return texts.get(card);
  }

  function apply() {
    const label = labels.find((input) => input.checked).value;
    const wanted = search.value.trim().toLowerCase();
    let shown = 0;
    for (const card of cards) {
      const fits =
        (!label || card.dataset.label === label) &&
        (!source.value || card.dataset.source === source.value) &&
        (!wanted || words(card).includes(wanted));
      card.hidden = !fits;
      shown += fits;
    }
    const filtered = source.value || wanted;
    for (const section of sections) {
      const empty = !section.querySelector("details:not([hidden])");
      section.hidden = (label && section.dataset.label !== label) || (empty && Boolean(filtered));
    }
    count.textContent = `${shown} of ${cards.length} shown`;
    none.hidden = shown > 0 || !filtered;
  }

  let waiting;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(apply, 150);
  });
  for (const input of [...labels, source]) input.addEventListener("change", apply);
  const openAll = (open) => cards.forEach((card) => (card.open = open && !card.hidden));
  document.getElementById("open").addEventListener("click", () => openAll(true));
  document.getElementById("close").addEventListener("click", () => openAll(false));
  document.getElementById("bar").hidden = false;
  apply();
})();
