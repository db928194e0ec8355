// What the pages need beyond links, forms and htmx.
"use strict";

// A box with `data-chooses="NAME"` chooses all boxes of that name in its form. Without this script it stays hidden.
for (const all of document.querySelectorAll("input[data-chooses]")) {
  const boxes = [...all.form.elements].filter((box) => box.type === "checkbox" && box.name === all.dataset.chooses);
  const count = () => boxes.filter((box) => box.checked).length;
  const show = () => {
    all.checked = count() === boxes.length;
    all.indeterminate = count() > 0 && !all.checked;
  };
  all.closest("[hidden]")?.removeAttribute("hidden");
  all.addEventListener("change", () => boxes.forEach((box) => { box.checked = all.checked; }));
  all.form.addEventListener("change", show);
  show();
}
