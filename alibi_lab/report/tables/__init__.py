"""Tables of the page, as plain text and values, one file per subject."""
