#!/bin/sh
# Compiles our crates' test binaries with less optimisation (1 in place of 3). They run for seconds, and their
# optimisation took longer than that of the programs. Cargo compiles everything else as the profile says.
case " $* " in
    *" --test "*) exec "$@" -C opt-level=1 ;;
    *) exec "$@" ;;
esac
