"""Tests in forked processes."""

import multiprocessing


def in_child(work):
    """Returns the result of `work` in a forked child. Fails if it takes longer than 600 s."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(work()))
    child.start()
    # The sender of this process is closed, so that the pipe ends with the child.
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
