// How the site's search ranks pages: names of the API first, the log and the changes last.
var Scorer = {
  score: ([docname, , , , score]) => (["log", "changes"].includes(docname) ? score - 100 : score),
  objNameMatch: 100,
  objPartialMatch: 60,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
