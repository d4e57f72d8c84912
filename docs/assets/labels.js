/* The copy buttons are added as a reader scrolls: each is a landmark, so each needs a name of its own. */
let blocks = 0
new MutationObserver(() => {
  for (const each of document.querySelectorAll(".md-code__nav:not([aria-label])"))
    each.setAttribute("aria-label", `Code block ${++blocks}`)
}).observe(document.body, { childList: true, subtree: true })
