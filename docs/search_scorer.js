// How the search of the site ranks what it finds; Sphinx copies this file into _static/language_data.js.
// Pages for users come first, then the reference, then pages for contributors.

const PAGES_FOR_CONTRIBUTORS = [
  "architecture", "benchmarks", "changelog", "code-of-conduct", "contributing", "protocol",
  "reporting_vulnerabilities", "workers",
];
const REFERENCE = /^(api|reference)\/|^(api|commands)$/;

function wordsOfTheQuery() {
  const query = new URLSearchParams(window.location.search).get("q") || "";
  return query.toLowerCase().split(/[^\p{Letter}\p{Number}_]+/u).filter((word) => word.length > 1);
}

// A word matches its plural, and the other way around.
function isIn(text, word) {
  return text.toLowerCase().includes(word.replace(/s$/, ""));
}

var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    if (PAGES_FOR_CONTRIBUTORS.includes(page)) return score - 4;
    if (REFERENCE.test(page)) return score;
    const words = wordsOfTheQuery();
    const isAbout = words.length > 0 && words.every((word) => isIn(`${title} ${page}`, word));
    return score + (isAbout ? 8 : 3);
  },
  // The full name, or the last part of the name, of a function, class, or module.
  objNameMatch: 11,
  objPartialMatch: 4,
  objPrio: { 0: 1, 1: 0, 2: -5 }, // modules; other objects; objects that aren't important
  objPrioDefault: 0,
  // A word of a title or a heading, as a whole or in part, and of the text.
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
