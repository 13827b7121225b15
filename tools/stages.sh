# Sourced: runs named stages, records how long each took, and reports them.

stages_file=${FLASH_ATTN_STAGES:-build/stages.tsv}

# stage NAME COMMAND...: runs it without standard input; the whole run ends with the first that fails.
stage() {
  local name=$1 start=$SECONDS status=0
  shift
  printf '\n=== %s\n' "$name"
  # Not `... || status=$?`: bash switches errexit off inside a function that is called so.
  set +e
  (set -e && "$@" </dev/null)
  status=$?
  set -e
  mkdir -p "$(dirname "$stages_file")"
  printf '%s\t%s\t%d\n' "$name" "$([ $status -eq 0 ] && echo passed || echo FAILED)" $((SECONDS - start)) >>"$stages_file"
  if [ $status -ne 0 ]; then
    printf '\n=== %s FAILED with status %d\n' "$name" "$status"
    exit 1
  fi
}

# The table of the stages so far, with the total.
report_stages() {
  [ -f "$stages_file" ] || return 0
  awk -F '\t' '{ printf "%-28s %-7s %3d:%02d\n", $1, $2, $3 / 60, $3 % 60; total += $3 }
               END { printf "%-28s %-7s %3d:%02d\n", "total", "", total / 60, total % 60 }' "$stages_file"
}
