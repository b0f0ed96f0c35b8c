"use strict";
const VIEWS = {};
