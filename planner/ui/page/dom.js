// Creating and updating elements. Names chosen by callers are inserted as text, never as markup.

/**
 * Create an element.
 * @param {string} tag  its name, followed by classes: `li.problem`
 * @param {Record<string, string | number | boolean | ((event: Event) => void) | undefined>} [attributes]
 *   attributes; functions are listeners; false and undefined are omitted
 * @param {...(Node | string | undefined)} children  texts and elements
 * @returns {HTMLElement}
 */
export function createElement(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [attribute, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(attribute, value);
    else if (value !== undefined && value !== false) element.setAttribute(attribute, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

/** @param {string} id @returns {HTMLElement} the element of the page with this id */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/** Change a text if it differs: unchanged text costs no layout. @param {Node} node @param {string} text */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Change an attribute if it differs. @param {Element} element @param {string} name @param {string | undefined} value */
export function setAttribute(element, name, value) {
  if (value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Change a style property if it differs, through the style object: the page's policy forbids style attributes.
 * @param {HTMLElement} element @param {string} property @param {string} value */
export function setStyle(element, property, value) {
  if (element.style.getPropertyValue(property) !== value) element.style.setProperty(property, value);
}

/**
 * Update the children of `parent` to match `items`, in order, reusing elements by key.
 * @template T
 * @param {HTMLElement} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => HTMLElement} create  an element for a new item
 * @param {(element: HTMLElement, item: T) => void} [update]  called for each item, including new ones
 */
export function updateList(parent, items, keyOf, create, update) {
  const known = elementsByParent.get(parent) ?? new Map();
  /** @type {Map<string, HTMLElement>} */
  const next = new Map();
  const itemsByKey = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, element] of known) if (!itemsByKey.has(key)) element.remove();
  let before = parent.firstElementChild;
  for (const [key, item] of itemsByKey) {
    const element = known.get(key) ?? create(item);
    next.set(key, element);
    if (element === before) before = element.nextElementSibling;
    else parent.insertBefore(element, before);
    update?.(element, item);
  }
  elementsByParent.set(parent, next);
}

/** @type {WeakMap<HTMLElement, Map<string, HTMLElement>>} */
const elementsByParent = new WeakMap();
