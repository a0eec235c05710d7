"""OpenAI's HTTP interface in front of a server: models, completions and chat completions.

Needs the extra packages of `mtp-client[gateway]`. The command is `mtp-client gateway`.
"""
