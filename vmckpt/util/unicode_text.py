"""Text of any origin as valid Unicode. Pure."""


def encodable(text: str) -> str:
    """Return a text that can be encoded as UTF-8, with "?" for the other characters.

    Arguments and file names may contain bytes of any encoding, which Python keeps as surrogates.
    """
    return text.encode("utf-8", "replace").decode()
