#!/bin/bash
# One rank of a Slurm job: task.sh DIRECTORY COMMAND... runs COMMAND and leaves its exit code in DIRECTORY/<rank>.
#
# Slurm signals this shell as well as the command. A request to save (USR1) that comes before the command can take it
# must not end either of them: it is ignored until the command has a handler. TERM and INT reach the command alone.
trap '' USR1
trap : TERM INT
exits=$1
shift
"$@"
code=$?
echo "$code" > "$exits/$SLURM_PROCID"
exit "$code"
