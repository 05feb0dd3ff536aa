// Making and changing elements. Whatever a caller of the planner named goes in as text, never as markup.

/**
 * An element.
 * @param {string} tag  its name, and its classes behind dots: `li.trouble`
 * @param {Record<string, string | number | boolean | ((event: Event) => void) | undefined>} [attributes]
 *   attributes; functions are listeners; false and undefined are left out
 * @param {...(Node | string | undefined)} children  texts and elements
 * @returns {HTMLElement}
 */
export function make(tag, attributes = {}, ...children) {
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
export function at(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/** Change a text, where it is another one: what stays costs no layout. @param {Node} node @param {string} text */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Change an attribute, where it is another one. @param {Element} element @param {string} name @param {string | undefined} value */
export function set(element, name, value) {
  if (value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** A width in percent, by the style object: the policy of this page allows no style attributes in markup.
 * @param {HTMLElement} element @param {string} property @param {string} value */
export function style(element, property, value) {
  if (element.style.getPropertyValue(property) !== value) element.style.setProperty(property, value);
}

/**
 * Make the children of `parent` be those of `items`, in their order, keeping elements by key.
 * @template T
 * @param {HTMLElement} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => HTMLElement} create  an element for a new item
 * @param {(element: HTMLElement, item: T) => void} [update]  called for each item, new ones too
 */
export function list(parent, items, keyOf, create, update) {
  const known = kept.get(parent) ?? new Map();
  /** @type {Map<string, HTMLElement>} */
  const next = new Map();
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, element] of known) if (!wanted.has(key)) element.remove();
  let before = parent.firstElementChild;
  for (const [key, item] of wanted) {
    const element = known.get(key) ?? create(item);
    next.set(key, element);
    if (element === before) before = element.nextElementSibling;
    else parent.insertBefore(element, before);
    update?.(element, item);
  }
  kept.set(parent, next);
}

/** @type {WeakMap<HTMLElement, Map<string, HTMLElement>>} */
const kept = new WeakMap();
