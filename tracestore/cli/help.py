"""The help of the commands: their options in groups, and the commands in groups."""

from collections.abc import Sequence
from typing import Any

from tracestore.console import Parser

# Help texts, in the order of the help. Each name is a module of tracestore.cli.commands.
COMMAND_GROUPS = {
    "make": {
        "convert": "convert files of traces into a store",
        "work": "write tasks of a planned conversion, on any machine",
        "commit": "add what the tasks of a planned conversion have written to its store",
        "status": "print how many tasks of a planned conversion are written",
        "inspect": "print what files hold, and the layouts that they may have",
        "extract": "record traces of a language model that answers questions",
        "score": "add or replace scores without rewriting traces",
        "merge": "copy the traces of several stores into one",
        "subset": "copy some traces of a store into another store",
        "clean": "remove files of a store that no generation or plan names",
    },
    "look": {
        "info": "print the properties of a store",
        "verify": "check every byte of a store",
        "lint": "look for data-quality issues",
        "view": "show one trace: texts, attention, norms of hidden states",
        "report": "write an HTML page about a store",
        "serve": "browse a store on this machine",
        "doctor": "check versions, processor, memory, limits and disk, with advice",
        "completion": "print a completion script for a shell",
    },
    "learn": {
        "plan": "measure training: memory, time per epoch, the largest batch that fits",
        "train": "train hallucination detectors on a store",
        "predict": "score every trace with a trained detector",
        "compare": "test the differences between training runs",
        "detectors": "list the detectors that benchmark compares",
        "benchmark": "compare detectors on frozen folds, with controls and tests",
    },
    "share": {
        "export": "write a store to pickles, .pt, safetensors or Parquet files",
        "push": "upload a store to the Hugging Face Hub",
        "pull": "download a store from the Hugging Face Hub",
    },
}
COMMANDS = {name: text for commands in COMMAND_GROUPS.values() for name, text in commands.items()}
# The arguments of all commands by group, in the order of the help; COMMAND.NAME where a command differs. An argument
# that is missing here stands at the end of the group in which its command has added it.
OPTION_GROUPS = {
    "what": "store stores src file folders trace repo_id shell checkpoint model models twins lstm_solo gnn_det_lstm gvae_lstm "
    "probe detectors questions limit shard scores name default source version ids split segments subset.seed sample layer "
    "head results folder quick repair older_than dry_run plan wait as_one force no_lint watch watch_timeout skip_bad revision private license",
    "where": "dst out_dir output folds_dir resume overwrite",
    "model": "extract.layers instruction prompt_template max_new_tokens samples temperature extract.seed extract.dtype",
    "training": "epochs batch_size lr folds seeds seed precision grad_accum_steps shuffle shuffle_buffer",
    "data": "layout field score score_column id_column score_direction score_threshold group_column judges positions "
    "attention attention_threshold top_k top_logprobs lens dtype padding on_conflict drop_nonfinite provenance "
    "allow_mixed_provenance",
    "resources": "device extract.batch_size predict.batch_size memory memory_budget workers num_workers num_threads dask activation_checkpointing "
    "max_cache_batches checkpoint_interval_s commit_interval port",
    "output": "format codec traces_per_file save_detectors logger json help",
}


class CommandParser(Parser):
    """The parser of a command. Its help has groups, and ``--store X`` is another spelling of the argument STORE."""

    command = ""

    def format_help(self) -> str:
        """Return the help, with the options that most users need first in each group."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        listed = {name for names in OPTION_GROUPS.values() for name in names.split()}
        actions = {own if (own := f"{self.command}.{a.dest}") in listed else a.dest: a for a in self._actions}
        added = {group.title: group._group_actions for group in self._action_groups}
        for title, names in OPTION_GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments(actions[name] for name in names.split() if name in actions)
            formatter.add_arguments(a for a in added.get(title, ()) if a.dest not in listed)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the words of a command."""
        has_store = any(not action.option_strings and action.dest in ("store", "stores") for action in self._actions)
        if args is not None and has_store:
            words = [part for word in args for part in (word.split("=", 1) if word.startswith("--store=") else [word])]
            given = [k for k, word in enumerate(words[:-1]) if word == "--store"]
            others = [word for k, word in enumerate(words) if not {k, k - 1} & {*given}]
            args = [*(words[k + 1] for k in given), *others]
        return super().parse_known_args(args, namespace)


class ProgramParser(Parser):
    """The parser of `tracestore`, whose help has the commands in groups."""

    def format_help(self) -> str:
        """Return the help."""
        width = max(map(len, COMMANDS))
        lines = [f"usage: {self.prog} COMMAND ...", "", str(self.description)]
        for title, commands in COMMAND_GROUPS.items():
            lines += ["", f"{title}:", *(f"    {name:{width}}  {text}" for name, text in commands.items())]
        return "\n".join(
            [*lines, "", f"{self.prog} COMMAND --help describes a command; --version prints the version.", ""]
        )
