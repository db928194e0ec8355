// What the pages need beyond links, forms and htmx.
"use strict";
