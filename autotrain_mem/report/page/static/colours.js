// The colours of figures stand in page.css, in pairs for light and dark. A canvas needs them resolved.

function schemeNow() {
  const chosen = document.documentElement.dataset.scheme;
  return chosen || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
}

// A picture or a printed page is light, whatever the page is: the probe has a scheme of its own.
function coloursOf(scheme) {
  const probe = document.createElement('span'), known = new Map();
  return (name) => {
    if (!known.has(name)) {
      probe.style.colorScheme = scheme;
      probe.style.color = `var(--${name})`;
      document.body.append(probe);
      known.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return known.get(name);
  };
}

const SERIES_COLOURS = 6;

function seriesColour(index) {
  return `series-${1 + (index % SERIES_COLOURS)}`;
}

// Beyond the colours, and for who cannot tell them apart, lines differ in their dashes.
function seriesDash(index) {
  return [[], [7, 3], [2, 3], [9, 3, 2, 3]][(index + Math.floor(index / SERIES_COLOURS)) % 4];
}
