// How the site's search ranks pages: names of the API first (PyTorch before JAX), the log and the changes last.
const LATER = { log: 100, changes: 100, "api/jax": 1 };
var Scorer = {
  score: ([docname, , , , score]) => score - (LATER[docname] ?? 0),
  objNameMatch: 100,
  objPartialMatch: 60,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
