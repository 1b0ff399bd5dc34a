"""What a spec may not hold: control characters, secrets, and sbatch options that are vitra's own.

All functions are pure. A sentence they return never contains the value that it refuses.
"""

from __future__ import annotations

import re

# Lone surrogates are no characters: they cannot be written to a file as UTF-8.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# "scheme://user@". All searches here take time in proportion to the text, whatever it holds.
_USER = r"(?<=[A-Za-z0-9+.-])://[^/?#@]*@"
# "scheme://user:password@", where the password may hold "/", "?" or "#" (cloud keys do, and people
# paste them unescaped); so what follows "user:" counts unless it is a port.
_USER_AND_PASSWORD = r"(?<=[A-Za-z0-9+.-])://[^/?#@:\[]+:(?![0-9]+(?:[/?#]|$))"

#: Characters of one text; Linux passes a program no argument or variable of twice as many.
LONGEST_TEXT = 65536

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_ENDINGS = (
    "key",
    "secret",
    "secrets",
    "token",
    "password",
    "passwords",
    "passwd",
    "passphrase",
)
_NOT_SECRET = frozenset({"monkey", "donkey", "turkey", "hockey", "jockey", "whiskey"})

#: Options of sbatch that a spec may not pass by hand, and what to do instead.
REFUSED_SBATCH_OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        ("output", "error", "open-mode", "input"), "vitra writes the logs of a run itself"
    ),
    **dict.fromkeys(("requeue", "no-requeue"), "vitra decides on restarts; see retry.restart_on"),
    **dict.fromkeys(
        ("export", "export-file", "get-user-env"), "use resources.env for variables of the job"
    ),
    **dict.fromkeys(("job-name", "comment"), "vitra finds its job by it; the name is `name`"),
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node"), "use resources.tasks_per_node"
    ),
    **dict.fromkeys(
        ("ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"), "use resources.tasks_per_node"
    ),
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres"),
        "use resources.gpus_per_node and resources.gpu_request",
    ),
    **dict.fromkeys(("uid", "gid"), "a job runs as the user who submits it"),
    **dict.fromkeys(
        ("parsable", "quiet", "test-only", "wait", "help", "usage", "version", "autocomplete"),
        "it changes what sbatch answers, and vitra reads that answer",
    ),
    "array": "one run is one job",
    "wrap": "vitra sends its own script; use resources.setup for shell lines",
    "chdir": "vitra sets the directory of the job",
    "signal": "use resources.signal_lead_s",
    "time": "use resources.time",
    "nodes": "use resources.nodes",
    "cpus-per-task": "use resources.cpus_per_task",
    "mem": "use resources.mem_gb",
    "partition": "use resources.partition",
    "account": "use resources.account",
    "qos": "use resources.qos",
    "constraint": "use resources.constraint",
    "exclude": "use resources.exclude",
    "nodelist": "use resources.nodelist",
    "nodefile": "use resources.nodelist",
    "reservation": "use resources.reservation",
}

_SBATCH_NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


def has_user_info(text: str) -> bool:
    """True where `text` holds a URL with a user name or a password in it."""
    for word in text.split():
        last_at = word.rfind("@")
        if last_at >= 0 and (
            re.search(_USER, word)
            or any(last_at >= match.end() for match in re.finditer(_USER_AND_PASSWORD, word))
        ):
            return True
    return False


def text_problem(text: str) -> str | None:
    """Why `text` may not stand in a spec at all, or None."""
    if len(text) > LONGEST_TEXT:
        return f"is longer than {LONGEST_TEXT} characters"
    found = _CONTROL.search(text)
    if found:
        what = "a line break" if found[0] in "\n\r\u2028\u2029" else "a control character"
        return (
            f"holds {what} (U+{ord(found[0]):04X}) at character {found.start() + 1}; "
            "text in a spec is one line without control characters"
        )
    if has_user_info(text):
        return (
            "holds a URL with a user name or password in it; leave it out and give credentials "
            "through the environment or a credential file"
        )
    return None


def looks_secret(name: str) -> bool:
    """True where a name says that its value is a secret: a word in it is or ends in key, secret,
    token or password. Words end at underscores, dashes, digits and capitals (`apiKey`)."""
    words = (word.lower() for word in _WORD.findall(name))
    return any(word.endswith(_SECRET_ENDINGS) and word not in _NOT_SECRET for word in words)


def sbatch_option_problem(name: str) -> str | None:
    """Why the sbatch option `name` (dashes, no leading ones) may not be passed by hand, or None.

    sbatch takes any unambiguous beginning of a long option for the option, so `outp` is refused
    like `output`.
    """
    if name.startswith("-"):
        return "write the option's name without leading dashes"
    if len(name) == 1:
        return "is a short option; use its long name"
    if not re.fullmatch(_SBATCH_NAME, name):
        return "is no name of an sbatch option (lower-case letters, digits, dashes)"
    if name in REFUSED_SBATCH_OPTIONS:
        return f"may not be set here: {REFUSED_SBATCH_OPTIONS[name]}"
    for refused, reason in REFUSED_SBATCH_OPTIONS.items():
        if refused.startswith(name):
            return f"may not be set here, since sbatch can read it as {refused}: {reason}"
    return None
