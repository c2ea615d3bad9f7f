"""The models of appendix A.3 (Toronto BookCorpus): another domain, the same slopes.

paper: the WikiText-103 model with one tied matrix of 29,000 byte pairs in place of the adaptive embedding and softmax.
The corpus is no longer distributed: pass the books as files (--text). small, medium: as for WikiText-103, with half as many
byte pairs, because the paper's vocabulary is smaller for books too; --text sets the books.
"""

from alibi_lab.lab.config import Method, RunConfig, Scale
from alibi_lab.recipes.paper import studies, wikitext

TRAINED = (512, 1024, 3072)


def training(method: Method, paper_length: int, scale: Scale, *, staged: bool = False) -> RunConfig:
    """The run of a method trained at a length of the paper; `staged` trains on short examples first."""
    return studies.changed_by("books", scale, wikitext.training(method, paper_length, scale, staged=staged))
