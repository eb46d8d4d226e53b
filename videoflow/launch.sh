# Starts videoflow on a cluster: sh launch.sh COMMAND…
# Travels with every submitted job. The interpreter on PATH need not be the one that has videoflow, so the first of
# these that can import it is taken: what VIDEOFLOW_PYTHON names, the one that Ray itself runs with, python3, python.

ray_python() { # Ray's node process is an ancestor of ours; its command line says how it starts Python workers
  pid=$$
  while [ "${pid:-0}" -gt 1 ] && [ -r "/proc/$pid/stat" ]; do
    found=$(tr '\0' '\n' <"/proc/$pid/cmdline" |
      sed -n -e 's/^--python_worker_command="\([^"]*\)".*/\1/p' -e 's/^--python_worker_command=\([^" ]*\) .*/\1/p')
    if [ -n "$found" ]; then
      echo "$found"
      return
    fi
    pid=$(sed 's/.*) //' "/proc/$pid/stat" | cut -d ' ' -f 2)
  done
}

tried=
for python in "$VIDEOFLOW_PYTHON" "$(ray_python)" python3 python; do
  [ -n "$python" ] || continue
  if "$python" -c 'import videoflow.keys' 2>/dev/null; then # a small module that needs what is installed with it
    exec "$python" -m videoflow.cli.main "$@"
  fi
  tried="$tried${tried:+, }$python"
done
echo "videoflow: no interpreter here can import videoflow (tried $tried): install it in the cluster's image, or name its interpreter by --python" >&2
exit 2
