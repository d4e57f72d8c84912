// The panel beside a figure: its legend, and what it shows at the point under the cursor. It is built once, and as
// tall as it ever gets, so that nothing below moves while a reader hovers; afterwards only texts change.

function make(name, className = '', text = '') {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function makePanel(model, onToggle) {
  const panel = make('div', 'panel'), where = make('div', 'where'), place = make('div', 'place');
  const {table, cells, buttons} = panelTable(model, onToggle);
  const holders = holderSlots(model.holderSlots), marked = make('div', 'marked');
  marked.hidden = true;
  panel.append(where, place, table, ...holders.elements, ...(model.hasMarks ? [marked] : []));
  const show = (reading) => {
    setText(where, reading.where);
    setText(place, reading.place);
    cells.forEach((cell, row) => setText(cell, reading.values[row]));
    holders.show(reading.holders);
    marked.hidden = !reading.marked.length;
    setText(marked, reading.marked.join('\n'));
  };
  return {panel, show, buttons};
}

// A text that is as it was costs no layout.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function panelTable(model, onToggle) {
  const table = make('table'), cells = [], buttons = [];
  let hasSum = false;
  for (const row of model.rows) {
    const line = table.insertRow(), head = make('th');
    head.scope = 'row';
    if ('sum' in row) {
      line.className = hasSum ? 'sum' : 'sum first';
      hasSum = true;
      head.textContent = row.sum;
    } else {
      buttons[row.part] = legendButton(model.parts[row.part], () => onToggle(row.part));
      head.append(buttons[row.part]);
    }
    line.append(head);
    cells.push(line.insertCell());
  }
  return {table, cells, buttons};
}

function legendButton(part, onClick) {
  const button = make('button', 'legend'), swatch = make('span', part.isArea ? 'swatch' : 'swatch line');
  button.type = 'button';
  button.setAttribute('aria-pressed', 'true');
  swatch.style.color = `var(--${part.colour})`;
  if (part.dash && part.dash.length) swatch.classList.add('dashed');
  button.append(swatch, make('span', '', part.name));
  button.addEventListener('click', onClick);
  return button;
}

const LONGEST_MODULE = 33;

function holderSlots(count) {
  if (!count) return {elements: [], show: () => {}};
  const slots = Array.from({length: count}, () => {
    const slot = make('div', 'holder'), module = make('div', 'module'), size = make('div', 'size');
    slot.append(module, size);
    return {slot, module, size};
  });
  const show = (holders) => slots.forEach(({slot, module, size}, index) => {
    const holder = holders[index];
    setText(module, holder ? shortened(holder.module) : '');
    setText(size, holder ? `${holder.owner}, ${holder.size}` : '');
    slot.title = holder ? holder.module : '';
  });
  return {elements: [make('h3', '', 'Largest holders'), ...slots.map(({slot}) => slot)], show};
}

// The end of a module's name tells it from others.
function shortened(name) {
  if (name.length <= LONGEST_MODULE) return name;
  const end = name.slice(1 - LONGEST_MODULE), dot = end.indexOf('.');
  return `…${dot > 0 ? end.slice(dot) : end}`;
}

function spoken(model, reading) {
  const values = model.rows.map((row, index) => `${'sum' in row ? row.sum : model.parts[row.part].name} ${reading.values[index]}`);
  const holders = reading.holders.map(({module, size}) => `${module} ${size}`);
  const largest = holders.length ? `. Largest holders: ${listed(holders)}` : '';
  return `${listed([reading.where, reading.place])}: ${listed(values)}${largest}. ${reading.marked.join(' ')}`;
}
