#!/bin/sh
# The image's first program: picks what to run and becomes it. What cleans and prepares is in the `fmengine`
# command's own start, since `apptainer exec` does not come by here.
#
#   train ARGS...       any command of fmengine; an unknown word gives its help and exit code 2
#   fmengine ARGS...    the same
#   shell ARGS...       a shell
#   /path/to/PROGRAM    that program

case ${1-} in
shell)
    shift
    exec bash "$@"
    ;;
fmengine)
    exec "$@"
    ;;
*/*)
    # a path that is no program is an unknown word like others
    if [ -f "$1" ] && [ -x "$1" ]; then
        exec "$@"
    fi
    ;;
esac
exec fmengine "$@"
