// Memory over a rehearsed step: owners stacked, what is reserved as a line, phases in a strip above.

// A column is packed as steps from value to value; [n] stands for n steps of nothing (figures.py: differences).
function summed(packed) {
  const values = [];
  let value = 0;
  for (const each of packed) {
    if (typeof each === 'number') values.push((value += each));
    else for (let count = each[0]; count > 0; count--) values.push(value);
  }
  return values;
}

const SHADES = {forward: 1, backward: 2, 'optimizer step': 3, generate: 3, save: 2};
const STRIP = 20;

function timelineModel(data) {
  const event = summed(data.event), reserved = summed(data.reserved);
  const allOwners = data.owners.map(({name, bytes}) => ({name: name.replaceAll('_', ' '), colour: name, bytes: summed(bytes)}));
  const owners = allOwners.filter((owner) => owner.bytes.some(Boolean));
  const phases = phaseStretches(data.phases, event[event.length - 1]);
  const totals = event.map((_, point) => owners.reduce((sum, owner) => sum + owner.bytes[point], 0));
  const top = ceilingOf(Math.max(...reserved, ...totals), {budget: data.budget});
  // The panel lists owners as they lie on one another, the uppermost first; so they are also drawn, each over the last.
  const parts = owners.map(({name, colour}) => ({name, colour, isArea: true})).reverse();
  parts.push({name: 'reserved by torch', colour: 'ink', dash: []});
  return {
    x: event, ends: [event[0], event[event.length - 1]], xTitle: 'events of the rehearsal', unit: 'bytes', height: 500, headroom: STRIP + 8, home: data.peak,
    parts,
    rows: [...owners.map((_, part) => ({part})), {sum: 'allocated'}, {part: owners.length}, {sum: 'budget'}],
    formatX: formatCount,
    range: () => [0, top],
    columns: (hidden) => [...stacked(owners, hidden), reserved],
    paths: () => uPlot.paths.stepped({align: 1}),
    paint: (pen) => {
      drawPhases(pen, phases);
      drawLimits(pen, [['budget', data.budget]], 'bytes');
      drawPeak(pen, event[data.peak], totals[data.peak]);
    },
    reading: (point) => ({
      where: `${phaseAt(phases, event[point])}${point === data.peak ? ', at the peak' : ''}`,
      place: `event ${formatCount(event[point])} of ${formatCount(data.events)}`,
      values: [
        ...owners.map((owner) => formatBytes(owner.bytes[point])).reverse(),
        formatBytes(totals[point]), formatBytes(reserved[point]), formatBytes(data.budget),
      ],
      holders: data.holderSets[data.holdersAt[point]].map((index) => holderOf(data, allOwners, data.holders[index])),
      marked: [],
    }),
    holderSlots: Math.max(...data.holderSets.map((set) => set.length), 0),
  };
}

function holderOf(data, owners, [module, owner, bytes]) {
  return {module: data.modules[module] || '(no module)', owner: owners[owner].name, size: formatBytes(bytes)};
}

// Sums from below, the highest first; what is hidden adds nothing, so that those above it come down.
function stacked(owners, hidden) {
  const columns = [];
  let below = new Array(owners[0].bytes.length).fill(0);
  owners.forEach((owner, index) => {
    const isHidden = hidden.has(owners.length - 1 - index);
    below = isHidden ? below : below.map((bytes, point) => bytes + owner.bytes[point]);
    columns.unshift(below);
  });
  return columns;
}

function phaseStretches(phases, last) {
  const stretches = [];
  for (const [name, from] of phases) {
    const before = stretches[stretches.length - 1];
    if (before && before.name === name) continue;
    if (before) before.to = from;
    stretches.push({name, from, to: last});
  }
  return stretches;
}

function phaseAt(phases, event) {
  let low = 0, high = phases.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (phases[middle].from <= event) low = middle + 1;
    else high = middle;
  }
  return low ? phases[low - 1].name : 'before the step';
}

function drawPhases(pen, phases) {
  const {ctx, box, look} = pen, height = STRIP * look.scale, top = box.top - height - 4 * look.scale;
  const within = (place) => Math.min(Math.max(place, box.left), box.right);
  for (const {name, from, to} of phases) {
    const [left, right] = [within(pen.x(from)), within(pen.x(to))];
    if (right <= left) continue;
    ctx.fillStyle = look.colour(`phase-${SHADES[name] || 1}`);
    ctx.fillRect(left, top, right - left, height);
    if (right - left > 3 && left > box.left) {
      drawLine(pen, [left, top], [left, top + height], 'ground');
      drawLine(pen, [left, box.top], [left, box.bottom], 'soft', {dash: [1, 3]});
    }
    if (textWidth(pen, name) + 8 * look.scale < right - left) {
      drawText(pen, name, (left + right) / 2, top + height / 2, {align: 'center', rim: false});
    }
  }
}

function drawPeak(pen, event, bytes) {
  if (!pen.isShown(event)) return;
  const {ctx, box, look} = pen, x = pen.x(event), y = pen.y(bytes), text = `peak ${formatBytes(bytes)}`;
  ctx.beginPath();
  ctx.arc(x, y, 4 * look.scale, 0, 2 * Math.PI);
  ctx.lineWidth = 2 * look.scale;
  ctx.strokeStyle = look.colour('ink');
  ctx.fillStyle = look.colour('ground');
  ctx.fill();
  ctx.stroke();
  const room = textWidth(pen, text, 600) + 16 * look.scale, toLeft = x + room > box.right;
  drawText(pen, text, x + (toLeft ? -9 : 9) * look.scale, y + 11 * look.scale, {align: toLeft ? 'right' : 'left', weight: 600});
}
