"""How to install what fusedblock takes only for some of its work, in the words of every message that says so."""


def install(extra: str) -> str:
    """The command, as the README has it: no package index has fusedblock."""
    return f"pip install '.[{extra}]' in the directory of fusedblock's source"
