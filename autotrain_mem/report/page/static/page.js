// Starts the page: figures are drawn when they come near the screen, all of them before it is printed.

function start() {
  const data = JSON.parse(document.getElementById('data').textContent);
  const frames = [...document.querySelectorAll('.figure')], views = new Map();
  const viewOf = (frame) => {
    if (!views.has(frame)) views.set(frame, new View(frame, data.figures[frame.dataset.index], data.title));
    return views.get(frame);
  };
  drawInSight(frames, viewOf);
  redrawInOtherColours(views);
  drawForPaper(frames, viewOf);
  addCopy();
}

function drawInSight(frames, viewOf) {
  const observer = new IntersectionObserver((entries) => {
    for (const {target} of entries.filter((entry) => entry.isIntersecting)) {
      observer.unobserve(target);
      if (!viewOf(target).plot) viewOf(target).draw();
    }
  }, {rootMargin: '400px'});
  for (const frame of frames) observer.observe(frame);
}

function redrawInOtherColours(views) {
  const redraw = () => views.forEach((view) => view.plot && view.draw());
  const button = document.getElementById('scheme');
  const name = () => (button.textContent = schemeNow() === 'dark' ? 'Light colours' : 'Dark colours');
  const changed = () => [name(), redraw()];
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed);
  button.addEventListener('click', () => {
    document.documentElement.dataset.scheme = schemeNow() === 'dark' ? 'light' : 'dark';
    changed();
  });
  button.hidden = false;
  name();
}

function drawForPaper(frames, viewOf) {
  const print = (isPrinting) => frames.forEach((frame) => viewOf(frame).print(isPrinting));
  addEventListener('beforeprint', () => print(true));
  addEventListener('afterprint', () => print(false));
  matchMedia('print').addEventListener('change', (event) => print(event.matches));
}

function addCopy() {
  const button = document.getElementById('copy'), command = document.getElementById('command');
  if (!button) return;
  button.hidden = false;
  button.addEventListener('click', async () => {
    const isCopied = await copied(command);
    button.textContent = isCopied ? 'Copied' : 'Selected';
    speak(isCopied ? 'The command is copied.' : 'The command is selected.');
    setTimeout(() => (button.textContent = 'Copy'), 2000);
  });
}

// Some browsers keep the clipboard from a page that is a file: there the text is selected, and Ctrl-C does the rest.
async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return false;
  }
}

start();
