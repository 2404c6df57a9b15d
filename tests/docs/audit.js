// Evaluate to a list of what makes the page hard to read, for people or for screen readers.
(() => {
  const found = [];
  const note = (rule, element, more = "") => {
    const text = (element.outerHTML || element.textContent).replace(/\s+/g, " ").slice(0, 120);
    found.push(`${rule}: ${more} ${text}`);
  };
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const name = (element) =>
    (element.getAttribute("aria-label") || element.textContent.trim() || element.title ||
      [...element.querySelectorAll("img[alt], svg > title")].map((one) => one.alt || one.textContent).join(" ")).trim();

  // --- colors ---
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, n) => value * a + below[n] * (1 - a));
  const luminance = (color) => {
    const [r, g, b] = color.map((value) => {
      const part = value / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const ancestors = (element) => {
    const chain = [];
    for (let one = element; one; one = one.parentElement) chain.push(one);
    return chain.reverse();
  };
  const checked = new Map();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !visible(element) || checked.has(element)) continue;
    if (element.closest("svg, script, style, [disabled]")) continue;
    checked.set(element, true);
    let background = [255, 255, 255], opacity = 1;
    for (const one of ancestors(element)) {
      const style = getComputedStyle(one);
      background = over(rgba(style.backgroundColor), background);
      opacity *= style.opacity;
    }
    const style = getComputedStyle(element);
    const [r, g, b, a] = rgba(style.color);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = contrast(over([r, g, b, a * opacity], background), background);
    if (ratio < (large ? 3 : 4.5) - 0.005) note("contrast", element, ratio.toFixed(2));
  }

  // --- names and structure ---
  for (const image of document.images) {
    if (visible(image) && !image.alt?.trim()) note("no alt text", image);
    if (visible(image) && image.complete && !image.naturalWidth) note("image missing", image);
  }
  for (const link of document.querySelectorAll("a[href]")) {
    if (!visible(link)) continue;
    if (!name(link)) note("link without text", link);
    else if (/^(here|this|link|click here|more|read more|this page)$/i.test(name(link))) note("link text says nothing", link);
  }
  for (const button of document.querySelectorAll("button, [role=button], summary")) {
    if (visible(button) && !name(button)) note("button without text", button);
  }
  for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    if (!visible(field)) continue;
    if (!field.labels.length && !field.getAttribute("aria-label") && !field.title) note("field without label", field);
  }
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    if (!visible(heading)) continue;
    const next = Number(heading.tagName[1]);
    if (next > level + 1) note("heading skips a level", heading, `after h${level}`);
    level = next;
  }
  const titles = [...document.querySelectorAll("h1")].filter(visible);
  if (titles.length !== 1) found.push(`${titles.length} headings h1`);
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  for (const id of new Set(ids.filter((one, n) => ids.indexOf(one) !== n))) found.push(`id twice: ${id}`);
  if (!document.documentElement.lang) found.push("no language");
  if (!document.title.trim()) found.push("no title");
  if (!document.querySelector("meta[name=description]")?.content) found.push("no description");

  // --- width ---
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) {
    const wide = [...document.body.querySelectorAll("*")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1);
    note(`wider than ${innerWidth}`, wide.at(-1) || document.body, width);
  }
  return found;
})()
