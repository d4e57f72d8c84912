// Draws the figures as SVG and answers mouse, finger and keyboard. Texts are inserted as text, never as markup.

const SVG = 'http://www.w3.org/2000/svg';
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif';
const KEYS_HELP = '← → move, Shift or PgUp PgDn further, + − zoom, Esc all';
const MARK_REACH = 6; // pixels within which the mouse selects a mark
const SERIES_COLOURS = 6;
const DASHES = ['', '7 3', '2 3', '9 3 2 3']; // for readers who cannot tell the colours apart
const DOTTED_POINTS = 40; // a line with this many values or fewer shows each as a dot
const PHASE_SHADES = {forward: 1, backward: 2, 'optimizer step': 3, generate: 3, save: 2};
const MARKS = {'out of memory': ['▼', 'bad'], restart: ['●', 'accent'], checkpoint: ['■', 'soft'], warning: ['◆', 'series-2']};
const LONGEST_MODULE = 33;

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

// -- numbers: as support/units.py and figures.py write them --

const WHOLE = new Intl.NumberFormat('en-US', {maximumFractionDigits: 0});
const FOUR_DIGITS = new Intl.NumberFormat('en-US', {maximumSignificantDigits: 4});
const UNITS = [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']];
const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

function formatBytes(bytes) {
  const [unit, name] = UNITS.find(([size]) => Math.abs(bytes) >= size) ?? [1, 'B'], value = bytes / unit;
  return `${unit === 1 ? Math.round(value) : value.toFixed(Math.abs(value) < 10 ? 2 : 1)} ${name}`;
}

function formatValue(value, unit = '') {
  if (value == null) return '–';
  if (unit === 'bytes') return formatBytes(value);
  return `${(Math.abs(value) >= 1000 ? WHOLE : FOUR_DIGITS).format(value)} ${unit}`.trimEnd();
}

function formatClock(seconds) {
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, '0');
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

// Returns round values between low and high, at most so many: 1, 2 or 5 times a power of ten of the unit, or `steps`.
function ticksOf(low, high, most, unit = 1, steps = []) {
  const rough = (high - low) / Math.max(most, 1) / unit, power = 10 ** Math.floor(Math.log10(rough));
  const step = (steps.find((each) => each >= rough) ?? [1, 2, 5, 10].find((times) => times * power >= rough) * power) * unit;
  const ticks = [];
  for (let count = Math.ceil(low / step); count * step <= high; count++) ticks.push(count * step);
  return ticks;
}

function nearest(ascending, value) {
  let low = 0, high = ascending.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - ascending[low - 1] < ascending[low] - value ? low - 1 : low;
}

const ruler = document.createElement('canvas').getContext('2d');

function textWidth(text, weight = 400) {
  ruler.font = `${weight} 12px ${FONT}`;
  return ruler.measureText(text).width;
}

// -- drawing: places are in pixels of the plot area, whose upper left corner is 0, 0 --

function line(from, to, colour, dash, width = 1) {
  const ends = {x1: from[0], y1: from[1], x2: to[0], y2: to[1]};
  return svg('line', {...ends, stroke: `var(--${colour})`, 'stroke-dasharray': dash || null, 'stroke-width': width});
}

// A rim in the background's colour keeps a text readable where it lies on an area.
function label(text, x, y, {colour = 'ink', anchor = 'start', weight = 400, rim = true, size = null} = {}) {
  const outline = rim ? {stroke: 'var(--ground)', 'stroke-width': 4, 'stroke-linejoin': 'round', 'paint-order': 'stroke'} : {};
  const look = {fill: `var(--${colour})`, 'text-anchor': anchor, 'font-weight': weight, 'font-size': size, ...outline};
  return svg('text', {x, y, 'dominant-baseline': 'central', ...look}, text);
}

// Draws a figure into an SVG of that size: `range` is the shown part of the x axis, `hidden` the lines left out.
function drawn(figure, {width, height, range, hidden}) {
  const [first, last] = range, lines = figure.lines.filter((each) => !hidden.has(each));
  const [low, high] = valueRange(figure, first, last);
  const [unit, unitName] = figure.unit === 'bytes' ? (UNITS.find(([size]) => high >= size) ?? UNITS[2]) : [1, ''];
  const ticks = ticksOf(low, high, height / 50, unit).map((value) => [value, value ? formatValue(value / unit, unitName) : '0']);
  const left = Math.max(40, 14 + Math.max(0, ...ticks.map(([, text]) => textWidth(text))));
  const top = figure.phases ? 28 : 24, wide = width - left - 26, tall = height - top - (figure.x_title ? 50 : 30);
  const pen = {
    wide, tall,
    x: (value) => Math.round(((value - first) / (last - first)) * wide * 10) / 10,
    y: (value) => Math.round((1 - (value - low) / (high - low)) * tall * 10) / 10,
    isShown: (value) => value >= first && value <= last,
  };
  const axes = [
    ...ticks.flatMap(([value, text]) => [
      line([0, pen.y(value)], [wide, pen.y(value)], 'line'),
      label(text, -7, pen.y(value), {colour: 'soft', anchor: 'end', rim: false}),
    ]),
    ...horizontalTicks(figure, pen, first, last).map(([value, text]) =>
      label(text, pen.x(value), tall + 15, {colour: 'soft', anchor: 'middle', rim: false})),
    label(figure.x_title, wide / 2, tall + 38, {colour: 'soft', anchor: 'middle', rim: false}),
  ];
  if (figure.y_title) axes.push(label(figure.y_title, 0, -13, {colour: 'soft', rim: false}));
  const shapes = svg('svg', {width: wide, height: tall}, ...(figure.rows ? bars(figure, lines, pen) : curves(figure, lines, pen)));
  const area = svg('g', {transform: `translate(${left} ${top})`}, ...axes, shapes, ...notes(figure, pen));
  const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, 'font-family': FONT, 'font-size': 12, 'aria-hidden': true}, area);
  return {picture, left, wide, top, tall};
}

// The axis of values starts at zero for bytes, shares and bars. A limit far above the values would press them flat.
function valueRange(figure, first, last) {
  const {x, lines, limits, rows, unit, steps} = figure, near = Object.values(limits), sums = stacked(lines, new Set());
  const columns = lines.map((each) => sums.get(each) ?? each.values);
  const known = (isShown) => columns.flatMap((values) => values.filter((value, at) => value != null && isShown(x[at])));
  const all = known(() => true), [least, most] = extent(all);
  if (!all.length) return [0, 1];
  if (rows || ((unit === 'bytes' || steps) && least >= 0)) {
    const ceiling = Math.max(most, 0, ...near.filter((each) => each <= 2.5 * most)) || 1;
    return [Math.min(least, 0) * 1.07, ceiling * 1.07];
  }
  const inSight = known((value) => value >= first && value <= last);
  const [bottom, top] = extent([...(inSight.length ? inSight : all), ...near]), rim = (top - bottom || Math.abs(top) || 1) * 0.08;
  return [bottom - rim, top + rim];
}

// Returns the minimum and maximum of values; there may be more values than a call can have arguments.
function extent(values) {
  return values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
}

function horizontalTicks({x, rows, is_log: isLog, isClock}, {wide}, first, last) {
  if (!rows) {
    const ticks = ticksOf(first, last, wide / 90, 1, isClock ? CLOCK_STEPS : isLog ? [0.1, 1, 2, 3] : []);
    return ticks.map((value) => [value, isClock ? formatClock(value) : formatValue(isLog ? Math.round(2 ** value) : value)]);
  }
  const letters = Math.max(2, Math.floor(wide / x.length / 6.6));
  return rows.map((name, at) => [at, name.length <= letters ? name : `${name.slice(0, letters - 1)}…`]);
}

// Sums the stacked lines from below, each with those under it; a hidden line adds nothing.
function stacked(lines, hidden) {
  const sums = new Map();
  let below = null;
  for (const each of lines.filter((one) => one.stacked && !hidden.has(one)).reverse()) {
    const under = below;
    below = each.values.map((value, at) => value + (under ? under[at] : 0));
    sums.set(each, below);
  }
  return sums;
}

function curves({x, lines: all, steps}, lines, pen) {
  const hidden = new Set(all.filter((each) => !lines.includes(each))), sums = stacked(all, hidden);
  return lines.flatMap((each) => {
    const values = sums.get(each) ?? each.values, colour = `var(--${each.colour})`;
    const points = x.map((value, at) => [value, values[at]]).filter(([, value]) => value != null);
    if (!points.length) return [];
    let path = `M${pen.x(points[0][0])} ${pen.y(points[0][1])}`, before = null;
    for (const [at, value] of points) {
      const place = pen.y(value);
      if (!steps) path += `L${pen.x(at)} ${place}`;
      else if (place !== before) path += `H${pen.x(at)}V${place}`;
      before = place;
    }
    if (steps) path += `H${pen.x(points.at(-1)[0])}`;
    if (each.stacked) return [svg('path', {d: `${path}V${pen.tall}H${pen.x(points[0][0])}Z`, fill: colour, stroke: colour})];
    const stroke = {fill: 'none', stroke: colour, 'stroke-width': 1.75, 'stroke-dasharray': each.dash || null};
    const dots = points.length <= DOTTED_POINTS ? points : [];
    const circles = dots.map(([at, value]) => svg('circle', {cx: pen.x(at), cy: pen.y(value), r: 2.5, fill: colour}));
    return [svg('path', {d: path, ...stroke}), ...circles];
  });
}

function bars({rows}, lines, pen) {
  const width = Math.min((Math.min(pen.x(1) - pen.x(0), 160) * 0.72) / lines.length, 44);
  return lines.flatMap(({values, colour}, place) => rows.flatMap((_, row) => {
    if (values[row] == null) return [];
    const top = Math.min(pen.y(values[row]), pen.y(0)), height = Math.max(Math.abs(pen.y(0) - pen.y(values[row])), 1);
    const left = pen.x(row) + (place - lines.length / 2) * width;
    return [svg('rect', {x: left, y: top, width: Math.max(width - 2, 1), height, fill: `var(--${colour})`})];
  }));
}

// What stands over the curves: limits, verticals, marks of incidents, phases and the peak, with their names.
function notes({limits, verticals, marks, phases, peak, unit, x, lines}, pen) {
  const parts = limitLines(limits, unit, pen);
  for (const [name, value] of Object.entries(verticals).filter(([, each]) => pen.isShown(each))) {
    const at = pen.x(value), isRight = at > pen.wide / 2;
    parts.push(line([at, 0], [at, pen.tall], 'accent', '6 4', 1.5));
    const edge = isRight ? Math.max(at - 6, textWidth(name, 600)) : Math.min(at + 6, pen.wide - textWidth(name, 600));
    parts.push(label(name, edge, 10, {colour: 'accent', anchor: isRight ? 'end' : 'start', weight: 600}));
  }
  for (const {seconds, kind} of marks.filter((each) => pen.isShown(each.seconds))) {
    const [sign, colour] = MARKS[kind] ?? ['▲', 'soft'], at = pen.x(seconds);
    parts.push(line([at, 0], [at, pen.tall], colour, '2 3'), label(sign, at, 5, {colour, anchor: 'middle', weight: 700}));
  }
  for (const [name, from, to] of phases ?? []) {
    const within = (value) => Math.min(Math.max(pen.x(value), 0), pen.wide), start = within(from), wide = within(to) - start;
    if (wide <= 0) continue;
    parts.push(svg('rect', {x: start, y: -24, width: wide, height: 20, fill: `var(--phase-${PHASE_SHADES[name] ?? 1})`}));
    if (wide > 3 && start > 0) parts.push(line([start, -24], [start, -4], 'ground'), line([start, 0], [start, pen.tall], 'soft', '1 3'));
    if (textWidth(name) + 8 < wide) parts.push(label(name, start + wide / 2, -14, {anchor: 'middle', rim: false}));
  }
  if (peak != null && pen.isShown(x[peak])) {
    const bytes = allocatedAt(lines, peak), text = `peak ${formatBytes(bytes)}`, at = [pen.x(x[peak]), pen.y(bytes)];
    const isRight = at[0] + textWidth(text, 600) + 16 > pen.wide;
    parts.push(svg('circle', {cx: at[0], cy: at[1], r: 4, fill: 'var(--ground)', stroke: 'var(--ink)', 'stroke-width': 2}));
    parts.push(label(text, at[0] + (isRight ? -9 : 9), at[1] + 11, {anchor: isRight ? 'end' : 'start', weight: 600}));
  }
  return parts;
}

// A limit above the figure is named at its edge, with an arrow. Where two names would meet, the lower one is written
// below its line, or to the left of the other.
function limitLines(limits, unit, pen) {
  const taken = [];
  return Object.entries(limits).sort(([, one], [, other]) => other - one).flatMap(([name, value]) => {
    const isAbove = pen.y(value) < -1, height = isAbove ? 0 : pen.y(value), colour = name.startsWith('budget') ? 'bad' : 'soft';
    const text = `${name} ${formatValue(value, unit)}${isAbove ? ' ↑' : ''}`;
    const met = (middle) => taken.filter((each) => Math.abs(each.middle - middle) < 15);
    const places = [height - 9, height + 9].filter((each) => each > 0), middle = places.find((each) => !met(each).length) ?? places[0];
    const right = Math.min(pen.wide - 4, ...met(middle).map((each) => each.left - 9));
    taken.push({middle, left: right - textWidth(text, 600)});
    const rule = isAbove ? [] : [line([0, height], [pen.wide, height], colour, '6 4', 1.5)];
    return [...rule, label(text, right, middle, {colour, anchor: 'end', weight: 600})];
  });
}

function allocatedAt(lines, point) {
  return lines.reduce((sum, each) => sum + (each.stacked ? each.values[point] : 0), 0);
}

// -- the panel beside a figure --

// Returns the description of a point. Keys select the marks next to it; the mouse also those within `reach`.
function reading(figure, point, reach = 0) {
  const {x, rows, lines, limits, unit, isClock, x_title: title} = figure, value = x[point];
  const lastKnown = ({values}) => (rows ? values[point] : values.slice(0, point + 1).findLast((one) => one != null));
  const valueOf = (each) => [each.name, formatValue(lastKnown(each), unit), each];
  const areas = lines.filter((each) => each.stacked), values = areas.map(valueOf);
  if (figure.phases) values.push(['tensors', formatBytes(allocatedAt(lines, point))]);
  values.push(...lines.filter((each) => !each.stacked).map(valueOf));
  for (const [name, limit] of Object.entries(limits)) values.push([name, formatValue(limit, unit)]);
  const marked = figure.marks.filter((each) => nearest(x, each.seconds) === point || Math.abs(each.seconds - value) <= reach);
  const texts = marked.map(({kind, step, text}) => `${(MARKS[kind] ?? ['▲'])[0]} ${kind}, step ${WHOLE.format(step)}: ${text}`);
  const common = {values, marked: texts, holders: []};
  if (!figure.phases) {
    const bin = () => x.slice(point, point + 2).map((edge, at) => WHOLE.format(Math.round(2 ** edge) - at)).join(' to ');
    const where = rows ? rows[point] : isClock ? formatClock(value) : figure.is_log ? bin() : formatValue(value);
    return {...common, where, place: rows ? '' : isClock ? 'since the start' : title};
  }
  const [phase] = figure.phases.findLast(([, from]) => from <= value) ?? ['before the step'];
  return {
    ...common,
    where: `${phase}${point === figure.peak ? ', at the peak' : ''}`,
    place: `event ${WHOLE.format(value)} of ${WHOLE.format(figure.events)}`,
    holders: figure.held[point].map((at) => figure.holders[at]).map(([module, owner, bytes]) => [module, `${owner}, ${formatBytes(bytes)}`]),
  };
}

function spoken({where, place, values, holders, marked}) {
  const largest = holders.length ? `. Largest holders: ${holders.map((each) => each.join(' ')).join(', ')}` : '';
  const facts = values.map(([name, value]) => `${name} ${value}`).join(', ');
  return `${[where, place].filter(Boolean).join(', ')}: ${facts}${largest}. ${marked.join(' ')}`;
}

function speak(text) {
  document.getElementById('aloud').textContent = text;
}

// Keeps the end of a module's name, which distinguishes it from others.
function shortened(name) {
  if (name.length <= LONGEST_MODULE) return name;
  const end = name.slice(1 - LONGEST_MODULE), dot = end.indexOf('.');
  return `…${dot > 0 ? end.slice(dot) : end}`;
}

// Changes a text only where it differs: an unchanged one costs no layout.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Builds the panel once at its greatest height, so that nothing moves below; returns a function that fills it.
function addPanel(body, figure, onToggle) {
  const where = html('div', {class: 'where'}), place = html('div', {class: 'place'}), table = html('table');
  const cells = reading(figure, figure.home).values.map(([name, , each]) => {
    const cell = html('td');
    table.append(html('tr', each ? {} : {class: 'sum'}, html('th', {scope: 'row'}, each ? legend(each, figure, onToggle) : name), cell));
    return cell;
  });
  const most = Math.max(0, ...(figure.held ?? []).map((each) => each.length)), marked = html('div', {class: 'marked', hidden: ''});
  const slots = Array.from({length: most}, () => html('div', {class: 'holder'}, html('div', {class: 'module'}), html('div', {class: 'size'})));
  const heading = most ? [html('h3', {}, 'Largest holders')] : [];
  body.append(html('div', {class: 'panel'}, where, place, table, ...heading, ...slots, ...(figure.marks.length ? [marked] : [])));
  return (shown) => {
    setText(where, shown.where);
    setText(place, shown.place);
    cells.forEach((cell, row) => setText(cell, shown.values[row][1]));
    slots.forEach((slot, at) => {
      const [module, size] = shown.holders[at] ?? ['', ''];
      setText(slot.firstChild, shortened(module));
      setText(slot.lastChild, size);
      slot.title = module;
    });
    marked.hidden = !shown.marked.length;
    setText(marked, shown.marked.join('\n'));
  };
}

function legend(each, {rows}, onToggle) {
  const kind = each.stacked || rows ? 'swatch' : each.dash ? 'swatch line dashed' : 'swatch line';
  const swatch = html('span', {class: kind}), button = html('button', {class: 'legend', type: 'button', 'aria-pressed': true}, swatch, each.name);
  swatch.style.color = `var(--${each.colour})`;
  button.addEventListener('click', () => button.setAttribute('aria-pressed', !onToggle(each)));
  return button;
}

// -- a figure on the page --

function makeFigure(frame, figure, pageTitle) {
  const {x, rows, marks} = figure, body = frame.querySelector('.figure-body'), hidden = new Set();
  figure.lines.forEach((each, at) => {
    let sum = 0;
    each.values ??= each.changes.map((change) => (sum += change));
    each.colour ??= `series-${1 + (at % SERIES_COLOURS)}`;
    each.dash = each.colour.startsWith('series') ? DASHES[(at + Math.floor(at / SERIES_COLOURS)) % DASHES.length] : '';
  });
  figure.isClock = figure.x_title === 'time';
  const seconds = marks.map((each) => each.seconds); // a mark may stand before the first value or behind the last
  const [start, end] = extent([x[0], x.at(-1), ...seconds]), ends = rows || start === end ? [start - 0.5, end + 0.5] : [start, end];
  let range = ends, point = figure.home, layout = null, pointer = null, pressed = null;

  const cursor = html('div', {class: 'cursor', hidden: ''}), band = html('div', {class: 'band', hidden: ''}), holder = html('div');
  const name = `${figure.title}. Arrow keys move along it, Home and End go to its ends.`;
  const role = {role: 'application', 'aria-roledescription': 'figure', 'aria-label': name};
  const box = html('div', {class: 'plot', tabindex: 0, ...role}, holder, band, cursor, html('span', {class: 'keys'}, KEYS_HELP));
  const save = html('button', {type: 'button', class: 'tool', 'aria-label': `Save ${figure.title} as PNG`}, 'Save PNG');
  const whole = html('button', {type: 'button', class: 'tool', hidden: ''}, 'Show all');
  frame.querySelector('.tools').append(whole, save);
  body.append(box);
  const show = addPanel(body, figure, (each) => {
    const isHidden = hidden.has(each) ? !hidden.delete(each) : Boolean(hidden.add(each));
    draw();
    return isHidden;
  });

  const height = (width) => (width < 560 ? 300 : figure.phases ? 500 : 300);
  const toValue = (left) => range[0] + ((left - layout.left) / layout.wide) * (range[1] - range[0]);
  const toPlace = (value) => layout.left + ((value - range[0]) / (range[1] - range[0])) * layout.wide;

  function draw() {
    const width = box.clientWidth;
    if (!width) return;
    layout = drawn(figure, {width, height: height(width), range, hidden});
    holder.replaceChildren(layout.picture);
    for (const {style} of [cursor, band]) [style.top, style.height] = [`${layout.top}px`, `${layout.tall}px`];
    if (!cursor.hidden) moveTo(point);
  }

  function moveTo(next, reach = 0) {
    point = next ?? figure.home;
    cursor.hidden = next == null;
    if (next != null) cursor.style.transform = `translateX(${toPlace(x[next])}px)`;
    show(reading(figure, point, reach));
  }

  function zoom(low, high) {
    const cut = [Math.max(low, ends[0]), Math.min(high, ends[1])];
    if (rows || cut[0] >= cut[1]) return;
    range = cut[0] === ends[0] && cut[1] === ends[1] ? ends : cut;
    whole.hidden = range === ends;
    draw();
  }

  function onKey(event) {
    const last = x.length - 1, leap = Math.max(1, Math.round(last / 20)), step = event.shiftKey ? 10 : 1, half = (range[1] - range[0]) / 2;
    const moves = {ArrowLeft: -step, ArrowRight: step, PageUp: -leap, PageDown: leap, Home: -last, End: last};
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const next = Math.min(Math.max(point + moves[event.key], 0), last);
      if (x[next] < range[0] || x[next] > range[1]) zoom(x[next] - half, x[next] + half);
      moveTo(next);
      speak(spoken(reading(figure, next)));
    } else if (event.key === 'Escape') zoom(...ends);
    else if ('+-='.includes(event.key)) {
      const reach = event.key === '-' ? 2 * half : half / 2;
      zoom(x[point] - reach, x[point] + reach);
      moveTo(point);
    } else return;
    event.preventDefault();
  }

  // Mouse events arrive more often than the screen is redrawn.
  function onPointer(event) {
    if (pointer === null) requestAnimationFrame(follow);
    pointer = event.clientX;
  }

  function follow() {
    const left = Math.min(Math.max(pointer - box.getBoundingClientRect().left, layout.left), layout.left + layout.wide);
    pointer = null;
    const value = toValue(left), near = nearest(x, value); // a step begins at its point, and ends at the next
    moveTo(figure.steps && near && x[near] > value ? near - 1 : near, rows ? 0 : toValue(MARK_REACH) - toValue(0));
    if (pressed === null) return;
    band.hidden = false;
    band.style.left = `${Math.min(pressed, left)}px`;
    band.style.width = `${Math.abs(left - pressed)}px`;
  }

  function release(event) {
    const left = event.clientX - box.getBoundingClientRect().left, start = pressed;
    pressed = null;
    band.hidden = true;
    if (start !== null && Math.abs(left - start) > 4) zoom(...[toValue(start), toValue(left)].sort((one, other) => one - other));
  }

  box.addEventListener('keydown', onKey);
  box.addEventListener('blur', () => moveTo(null));
  box.addEventListener('pointermove', onPointer);
  box.addEventListener('pointerleave', (event) => event.pointerType === 'mouse' && requestAnimationFrame(() => moveTo(null)));
  box.addEventListener('pointerdown', (event) => {
    if (event.pointerType !== 'mouse' || event.button !== 0 || rows) return;
    box.setPointerCapture(event.pointerId);
    pressed = event.clientX - box.getBoundingClientRect().left;
  });
  box.addEventListener('pointerup', release);
  box.addEventListener('dblclick', () => zoom(...ends));
  whole.addEventListener('click', () => zoom(...ends));
  save.addEventListener('click', () => savePng(figure, pageTitle, {range, hidden}));
  new ResizeObserver(draw).observe(box);
  moveTo(null);
}

// -- a figure as a picture: title, legend, axes and source, light, and wide enough for a slide --

const PICTURE = {width: 1600, scale: 1.5, rim: 27};

async function savePng(figure, pageTitle, shown) {
  const {rim, scale} = PICTURE, width = PICTURE.width / scale, inner = width - 2 * rim, height = figure.phases ? 500 : 300;
  const plot = drawn(figure, {width: inner, height, ...shown}).picture, keys = [];
  let left = rim, top = 58;
  for (const each of figure.lines.filter((one) => !shown.hidden.has(one))) {
    const wide = textWidth(each.name) + 35;
    if (left > rim && left + wide > width - rim) [left, top] = [rim, top + 19];
    const isArea = each.stacked || figure.rows;
    keys.push(isArea ? svg('rect', {x: left, y: top - 5.5, width: 11, height: 11, fill: `var(--${each.colour})`})
      : line([left, top], [left + 15, top], each.colour, each.dash, 2));
    keys.push(label(each.name, left + 19, top, {rim: false}));
    left += wide;
  }
  const whole = top + 22 + height + 37;
  filled(plot, {x: rim, y: top + 22, width: inner, height}, []);
  const words = [label(figure.title, rim, 29, {size: 19, weight: 650, rim: false}), label(`${pageTitle} · autofit`, rim, whole - 16, {colour: 'soft', rim: false})];
  const size = {width: PICTURE.width, height: Math.round(whole * scale), viewBox: `0 0 ${width} ${whole}`};
  const ground = svg('rect', {width, height: whole, fill: 'var(--ground)'});
  const picture = svg('svg', {...size, 'font-family': FONT, 'font-size': 12}, ground, ...words, ...keys, plot);
  const rules = document.querySelector('style').textContent, image = new Image(), canvas = html('canvas', {width: size.width, height: size.height});
  const lit = (reference, name) => rules.match(`--${name}: light-dark\\((#\\w+)`)?.[1] ?? reference;
  const text = new XMLSerializer().serializeToString(picture)
    .replace(/var\(--([\w-]+)\)/g, lit)
    .replace(/[^\t\n\r -\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, ''); // what XML does not allow
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  canvas.getContext('2d').drawImage(image, 0, 0);
  canvas.toBlob((blob) => {
    const link = html('a', {href: URL.createObjectURL(blob), download: `autofit-${figure.key}.png`});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }, 'image/png');
}

// -- the page --

function offerScheme() {
  const button = document.getElementById('scheme'), system = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (document.documentElement.dataset.scheme ?? (system.matches ? 'dark' : 'light')) === 'dark';
  const rename = () => (button.textContent = isDark() ? 'Light colours' : 'Dark colours');
  system.addEventListener('change', rename);
  button.addEventListener('click', () => {
    document.documentElement.dataset.scheme = isDark() ? 'light' : 'dark';
    rename();
  });
  button.hidden = false;
  rename();
}

function offerCopy() {
  const button = document.getElementById('copy'), command = document.getElementById('command');
  if (!button) return;
  button.hidden = false;
  button.addEventListener('click', async () => {
    // Some browsers give a local file no access to the clipboard: there the text is selected for Ctrl-C.
    const isCopied = await navigator.clipboard.writeText(command.textContent).then(() => true, () => false);
    if (!isCopied) getSelection().selectAllChildren(command);
    button.textContent = isCopied ? 'Copied' : 'Selected';
    speak(isCopied ? 'The command is copied.' : 'The command is selected.');
    setTimeout(() => (button.textContent = 'Copy'), 2000);
  });
}

const data = JSON.parse(document.getElementById('data').textContent);
document.querySelectorAll('.figure').forEach((frame, at) => makeFigure(frame, data.figures[at], data.title));
offerScheme();
offerCopy();
