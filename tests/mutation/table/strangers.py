"""What keeps strangers and second starters out: the lock of a folder, drafts, keyed messages, the secret of a job."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

FILES = "tests/tools/common/test_files.py"
KEYED = "tests/distributed/test_process_group.py::test_what_a_stranger_sets_counts_as_not_there"
SECOND = "tests/tools/test_outputs.py::test_a_second_starter_of_any_training_is_told_who_has_the_folder"
ROLL = "tests/tools/doctor/test_store_agreement.py"

MUTATIONS = (
    Mutation(
        "lock-owner-known-by-its-number-alone",
        "tensor3d/distributed/rank_status.py",
        old='if started != self.started or state in "ZX":',
        new='if state in "ZX":',
        tests=(f"{FILES}::test_a_process_of_the_same_number_is_another_one",),
    ),
    Mutation(
        "lock-of-a-rank-without-launcher-is-for-ever",
        "tools/common/files.py",
        old='return "alive" if int(parent) == self.launcher else "leaving"',
        new='return "alive"',
        tests=(f"{FILES}::test_a_rank_whose_launcher_is_gone_is_waited_for",),
    ),
    Mutation(
        "lock-is-written-over",
        "tools/common/files.py",
        old="            os.link(temporary, path)\n        except FileExistsError:",
        new="            os.replace(temporary, path)\n        except FileExistsError:",
        tests=(f"{FILES}::test_a_lock_is_made_once_and_of_whoever_is_gone_alone_it_is_taken_away",),
    ),
    Mutation(
        "lock-without-links-is-written-over",
        "tools/common/files.py",
        old="with create(path) as file:",
        new='with open(path, "wb") as file:',
        tests=(f"{FILES}::test_a_lock_is_made_once_and_of_whoever_is_gone_alone_it_is_taken_away",),
    ),
    Mutation(
        "lock-of-a-newcomer-is-taken-away-for-the-dead-one",
        "tools/common/files.py",
        old="if (taken := _look(aside)) is None or taken.content != seen.content:",
        new="if (taken := _look(aside)) is None:",
        tests=(f"{FILES}::test_a_lock_is_made_once_and_of_whoever_is_gone_alone_it_is_taken_away",),
    ),
    Mutation(
        "lock-of-the-next-owner-is-removed-at-the-end",
        "tools/common/files.py",
        old="if (seen := _look(path)) is not None and seen.content == content:\n                    path.unlink()",
        new="if _look(path) is not None:\n                    path.unlink()",
        tests=(f"{FILES}::test_whoever_was_taken_for_dead_is_interrupted",),
    ),
    Mutation(
        "lock-whoever-lost-it-goes-on",
        "tools/common/files.py",
        old="os.kill(os.getpid(), signal.SIGINT)",
        new="os.kill(os.getpid(), 0)",
        tests=(f"{FILES}::test_whoever_was_taken_for_dead_is_interrupted",),
    ),
    Mutation(
        "lock-second-starter-may-remove-the-run",
        "tools/gpt/train.py",
        old="(taken or check_unlocked(folder))",
        new="True",
        tests=(SECOND,),
    ),
    Mutation(
        "lock-second-starter-may-go-on-with-the-run",
        "tools/training/run_plan.py",
        old="(taken or check_unlocked(folder))",
        new="True",
        tests=(SECOND,),
    ),
    Mutation(
        "draft-opens-what-is-there",
        "tensor3d/files.py",
        old='open(path, "x+b", buffering, opener=_not_through_links)',
        new='open(path, "w+b", buffering, opener=_not_through_links)',
        tests=(FILES,),
    ),
    Mutation(
        "draft-of-a-name-that-can-be-guessed",
        "tensor3d/files.py",
        old='f"{path.name}.{uuid.uuid4().hex}.tmp"',
        new='f"{path.name}.{os.getpid():032x}.tmp"',
        tests=(f"{FILES}::test_the_name_of_a_draft_cannot_be_guessed_and_a_link_there_is_not_followed",),
    ),
    Mutation(
        "what-is-written-on-follows-links",
        "tensor3d/files.py",
        old='flags | getattr(os, "O_NOFOLLOW", 0), 0o666',
        new="flags, 0o666",
        tests=(f"{FILES}::test_what_is_changed_between_the_look_and_the_opening_is_neither_followed_nor_waited_for",),
    ),
    Mutation(
        "what-is-read-is-not-looked-at-again",
        "tensor3d/files.py",
        old="_check_regular(os.fstat(file.fileno()), path)",
        new="pass",
        tests=(f"{FILES}::test_what_is_changed_between_the_look_and_the_opening_is_neither_followed_nor_waited_for",),
    ),
    Mutation(
        "seal-of-no-secret",
        "tensor3d/distributed/job_store.py",
        old="hmac.new(self._secret, message",
        new='hmac.new(b"", message',
        tests=(KEYED,),
    ),
    Mutation(
        "seal-without-the-key",
        "tensor3d/distributed/job_store.py",
        old="len(key), key.encode(), value)",
        new='0, b"", value)',
        tests=(KEYED,),
    ),
    Mutation(
        "seal-without-the-part",
        "tensor3d/distributed/job_store.py",
        old="(len(self._part), self._part.encode(), len(key)",
        new='(0, b"", len(key)',
        tests=(KEYED,),
    ),
    Mutation(
        "seal-is-not-compared",
        "tensor3d/distributed/job_store.py",
        old="return text if hmac.compare_digest(seal, self._seal(key, text).encode()) else None",
        new="return text",
        tests=(KEYED,),
    ),
    Mutation(
        "seal-of-whoever-was-first-is-not-looked-at",
        "tensor3d/distributed/job_store.py",
        old="if opened is not None and (opened or not self._secret):\n                return opened",
        new='if found:\n                return opened or b""',
        tests=(KEYED,),
    ),
    Mutation(
        "compiled-code-of-others-is-run",
        "tensor3d/ops/compiled_regions.py",
        old="strange = everyone(_cache_of_others())",
        new='strange = everyone("")',
        tests=("tests/ops/test_compiled_regions.py::test_what_others_could_have_compiled_is_not_run",),
    ),
    Mutation(
        "gpt-removed-folder-stays-without-its-model",
        "tools/gpt/train.py",
        old="shown=cube.rank == 0, restore=restore)",
        new="shown=cube.rank == 0)",
        tests=("tests/tools/test_outputs.py::test_a_training_whose_folder_is_removed_under_it_leaves_a_whole_one",),
    ),
    Mutation(
        "roll-reads-a-strangers-verdict",
        "tools/doctor/store_agreement.py",
        old="except (TypeError, KeyError, AttributeError):",
        new="except KeyError:",
        tests=(f"{ROLL}::test_nonsense_in_the_place_of_what_others_tell_is_no_news",),
    ),
    Mutation(
        "roll-member-ends-with-an-error-of-the-parser",
        "tools/doctor/store_agreement.py",
        old="raise _foreign(key) from None\n\n\ndef _printable",
        new="raise\n\n\ndef _printable",
        tests=(ROLL,),
    ),
    Mutation(
        "secret-of-one-machine-is-the-same-for-all",
        "launch/torchrun.py",
        old='os.environ.setdefault("TENSOR3D_SECRET", secrets.token_hex(16))',
        new='os.environ.setdefault("TENSOR3D_SECRET", "0" * 32)',
        tests=("tests/launch/test_rank_forks.py::test_ranks_are_as_if_each_had_been_started_by_itself",),
    ),
    Mutation(
        "torchrun-leaves-the-ranks-that-it-has-begun",
        "launch/torchrun.py",
        old="until_started.enter_context(answered_later())",
        new="pass",
        tests=("tests/launch/test_repeated_signals.py::test_a_signal_between_the_start_of_two_ranks_reaches_both",),
    ),
    Mutation(
        "secret-of-hosts-is-the-same-for-all",
        "launch/ssh.py",
        old='os.environ.get("TENSOR3D_SECRET") or secrets.token_hex(16)',
        new='os.environ.get("TENSOR3D_SECRET") or "0" * 32',
        tests=("tests/launch/test_ssh.py::test_the_hosts_get_a_secret_that_no_command_line_shows",),
    ),
    Mutation(
        "secret-of-hosts-on-the-command-line",
        "launch/ssh.py",
        old="exec {shlex.join(launcher)}'",
        new="exec {shlex.join(launcher)} $TENSOR3D_SECRET'",
        tests=("tests/launch/test_ssh.py::test_the_hosts_get_a_secret_that_no_command_line_shows",),
    ),
    Mutation(
        "secret-file-that-the-group-can-write",
        "launch/common.sh",
        old='[ "${mode:4:6}" = ------ ]',
        new='[ "${mode:4:1}${mode:7:3}" = ---- ]',
        tests=("tests/launch/test_torchrun.py::test_secret_files",),
    ),
)
