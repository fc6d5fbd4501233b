"""Processes that are forked."""

import multiprocessing


def in_child(work):
    """What `work` returns in a forked child; fails if it takes longer than 600 s."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(work()))
    child.start()
    # Of this process; then the pipe ends with the child.
    sender.close()
    try:
        assert receiver.poll(600), "the child hangs"
        result = receiver.recv()
        child.join(600)
        assert child.exitcode == 0
        return result
    finally:
        child.kill()
        child.join()
