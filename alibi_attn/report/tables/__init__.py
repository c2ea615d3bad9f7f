"""Tables: the numbers of the page as rows of plain text and values, one file per subject."""
