// One figure on the page: its plot, its panel, and how mouse, finger and keyboard move its cursor.

const KEYS_HELP = '← → move, Shift or PgUp PgDn further, + − zoom, Esc all';
const PRINTED_WIDTH = 660;
const REACH = 6; // pixels within which a mouse meets a mark

class View {
  constructor(frame, data, pageTitle) {
    this.frame = frame;
    this.data = data;
    this.pageTitle = pageTitle;
    this.hidden = new Set();
    this.model = {timeline: timelineModel, chart: chartModel, bars: barsModel}[data.kind](data);
    this.point = this.model.home;
    this.isPrinting = false;
    this.build();
  }

  build() {
    const body = this.frame.querySelector('.figure-body');
    this.box = make('div', 'plot');
    this.panel = makePanel(this.model, (part) => this.toggle(part));
    this.makeFocusable();
    this.box.append(make('span', 'keys', KEYS_HELP));
    body.append(this.box, this.panel.panel);
    this.panel.show(this.model.reading(this.point));
    this.addTools();
    this.listen();
  }

  makeFocusable() {
    this.box.tabIndex = 0;
    this.box.setAttribute('role', 'application');
    this.box.setAttribute('aria-roledescription', 'figure');
    this.box.setAttribute('aria-label', `${this.data.title}. Arrow keys move along it, Home and End go to its ends.`);
  }

  addTools() {
    const save = make('button', 'tool', 'Save PNG');
    save.type = 'button';
    save.setAttribute('aria-label', `Save ${this.data.title} as PNG`);
    save.addEventListener('click', () => savePng(this));
    this.whole = make('button', 'tool', 'Show all');
    this.whole.type = 'button';
    this.whole.hidden = true;
    this.whole.addEventListener('click', () => this.zoom(null));
    this.frame.querySelector('.tools').append(this.whole, save);
  }

  listen() {
    this.box.addEventListener('keydown', (event) => this.onKey(event));
    this.box.addEventListener('blur', () => this.moveTo(null));
    // A finger that moves sideways moves the cursor; up and down scrolls the page (page.css: touch-action).
    this.box.addEventListener('pointermove', (event) => event.pointerType === 'touch' && this.plot && this.follow(event));
    new ResizeObserver(() => this.fit()).observe(this.box);
  }

  follow(event) {
    const left = event.clientX - this.plot.over.getBoundingClientRect().left;
    this.plot.setCursor({left: Math.min(Math.max(left, 0), this.plot.over.clientWidth), top: 0});
  }

  size() {
    const width = this.isPrinting ? PRINTED_WIDTH : this.box.clientWidth;
    return {width, height: width < 560 ? Math.min(this.model.height, 300) : this.model.height};
  }

  // Draws all anew: at first, in other colours, or with other parts.
  draw() {
    const range = this.plot && this.isZoomed() ? {...this.plot.scales.x} : null;
    this.plot?.destroy();
    const scheme = this.isPrinting ? 'light' : schemeNow(), look = {colour: coloursOf(scheme), scale: 1};
    const hooks = {setCursor: [() => this.onCursor()], setScale: [(_, key) => key === 'x' && this.onZoom()]};
    const options = plotOptions(this.model, look, {...this.size(), hidden: this.hidden, hooks});
    this.plot = new uPlot(options, [this.model.x, ...this.model.columns(this.hidden)], this.box);
    if (range) this.plot.setScale('x', {min: range.min, max: range.max});
  }

  fit() {
    const {width, height} = this.size();
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({width, height});
  }

  print(isPrinting) {
    if (this.isPrinting === isPrinting && this.plot) return;
    this.isPrinting = isPrinting;
    this.draw();
  }

  toggle(part) {
    if (!this.hidden.delete(part)) this.hidden.add(part);
    this.panel.buttons[part].setAttribute('aria-pressed', String(!this.hidden.has(part)));
    this.draw();
  }

  // -- the cursor --

  onCursor() {
    if (this.isMoving) return;
    if (this.isDue) return;
    // A mouse reports more often than a screen shows.
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      const {left, idx} = this.plot.cursor;
      if (left < 0 || idx == null) this.show(this.model.home);
      else this.show(idx, this.plot.posToVal(REACH, 'x') - this.plot.posToVal(0, 'x'));
    });
  }

  show(point, reach = 0) {
    this.point = point;
    this.panel.show(this.model.reading(point, reach));
  }

  // Moves the cursor line to a point; null takes it away.
  moveTo(point) {
    if (!this.plot) return;
    this.isMoving = true;
    if (point == null) this.plot.setCursor({left: -10, top: -10});
    else {
      this.bringIntoSight(point);
      this.plot.setCursor({left: this.plot.valToPos(this.model.x[point], 'x'), top: 1});
    }
    this.isMoving = false;
    this.show(point ?? this.model.home);
  }

  bringIntoSight(point) {
    const {min, max} = this.plot.scales.x, value = this.model.x[point], half = (max - min) / 2;
    if (value < min || value > max) this.zoom([value - half, value + half]);
  }

  onKey(event) {
    const last = this.model.x.length - 1, leap = Math.max(1, Math.round(last / 20)), step = event.shiftKey ? 10 : 1;
    const moves = {ArrowLeft: -step, ArrowRight: step, PageUp: -leap, PageDown: leap, Home: -last, End: last};
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      this.moveTo(Math.min(Math.max(this.point + moves[event.key], 0), last));
      speak(spoken(this.model, this.model.reading(this.point)));
    } else if (event.key === 'Escape') this.zoom(null);
    else if ('+-='.includes(event.key) && !this.model.rowNames) this.zoomAround(this.point, event.key === '-' ? 2 : 0.5);
    else return;
    event.preventDefault();
  }

  // -- zoom --

  zoomAround(point, factor) {
    const {min, max} = this.plot.scales.x, half = ((max - min) / 2) * factor, middle = this.model.x[point];
    this.zoom([middle - half, middle + half]);
    this.moveTo(point);
  }

  zoom(range) {
    const [first, last] = this.model.ends;
    const [min, max] = range ? [Math.max(range[0], first), Math.min(range[1], last)] : [first, last];
    if (this.plot && !this.model.rowNames && min < max) this.plot.batch(() => this.plot.setScale('x', {min, max}));
  }

  isZoomed() {
    const {min, max} = this.plot.scales.x, [first, last] = this.model.ends;
    return !this.model.rowNames && (min > first || max < last);
  }

  onZoom() {
    if (this.plot) this.whole.hidden = !this.isZoomed();
  }
}

// A reader of screens hears what the keyboard came to, and nothing of a mouse.
function speak(text) {
  document.getElementById('aloud').textContent = text;
}
