//! The kernels under sanitizers, for tests: launches are recorded, and `replay.cpp` runs them again, with an
//! operating system thread for every thread of a block.
//!
//! A recording is a sequence of launches, in native byte order:
//!
//! ```text
//! length u32, name │ blocks i64, size of a block u32 │ buffers u32, buffer… │ arguments u32, argument…
//! buffer:   length u64, contents before │ changed u8, contents afterwards if changed is 1
//! argument: buffer i32, offset u64; without a buffer -1, value u64
//! ```
//!
//! A buffer is the memory that a launch's tensors cover; tensors that overlap share one buffer.

use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use onefold_base::sync::locked;
use tch::Tensor;

use super::host::build;
use crate::device::Argument;
use crate::tensors;

/// A recording in progress.
#[derive(Debug)]
pub(super) struct Recording {
    folder: tempfile::TempDir,
    written: Mutex<(BufWriter<fs_err::File>, u64)>,
}

/// A finished recording.
#[derive(Debug)]
pub(super) struct Recorded {
    folder: tempfile::TempDir,
    launches: u64,
}

/// The memory of a launch's tensors: its address and its bytes, `None` for other arguments.
type Contents = Vec<Option<(usize, Vec<u8>)>>;

impl Recording {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = fs_err::File::create(folder.path().join("recording")).unwrap();
        Self { folder, written: Mutex::new((BufWriter::new(file), 0)) }
    }

    /// Calls `launch` and records it.
    pub(super) fn during(
        &self,
        kernel: &str,
        (blocks, size): (i64, u32),
        arguments: &[Argument<'_>],
        launch: impl FnOnce(),
    ) {
        let before = contents(arguments);
        launch();
        let after = contents(arguments);
        let buffers = buffers(&before);
        let mut bytes = Vec::new();
        let count = |count: usize| u32::try_from(count).unwrap().to_ne_bytes();
        bytes.extend(count(kernel.len()));
        bytes.extend(kernel.as_bytes());
        bytes.extend(blocks.to_ne_bytes());
        bytes.extend(size.to_ne_bytes());
        bytes.extend(count(buffers.len()));
        for buffer in &buffers {
            let [before, after] = [&before, &after].map(|contents| of_buffer(buffer, contents));
            bytes.extend((buffer.len() as u64).to_ne_bytes());
            bytes.extend(&before);
            bytes.push(u8::from(before != after));
            bytes.extend(if before == after { Vec::new() } else { after });
        }
        bytes.extend(count(arguments.len()));
        for (argument, tensor) in arguments.iter().zip(&before) {
            let start = tensor.as_ref().map(|(start, bytes)| *start..*start + bytes.len());
            let place = start.map(|own| {
                let holds = |buffer: &&Range<usize>| buffer.start <= own.start && own.end <= buffer.end;
                let (number, buffer) = buffers.iter().enumerate().find(|(_, b)| holds(b)).unwrap();
                (number as i32, (own.start - buffer.start) as u64)
            });
            let (buffer, value) = place.unwrap_or((-1, u64::from_ne_bytes(argument.bytes())));
            bytes.extend(buffer.to_ne_bytes());
            bytes.extend(value.to_ne_bytes());
        }
        let mut written = locked(&self.written);
        written.0.write_all(&bytes).unwrap();
        written.1 += 1;
    }

    pub(super) fn end(self) -> Recorded {
        let (mut file, launches) = self.written.into_inner().unwrap();
        file.flush().unwrap();
        Recorded { folder: self.folder, launches }
    }
}

/// Returns the memory of the tensors among the arguments, from each tensor's first to its last element.
fn contents(arguments: &[Argument<'_>]) -> Contents {
    let contents = |tensor: &Tensor| {
        let last: i64 =
            tensor.size().iter().zip(tensor.stride()).map(|(size, stride)| (size - 1) * stride).sum();
        let reached = if tensor.numel() == 0 { 0 } else { last + 1 };
        let all = tensor.detach().as_strided([reached], [1_i64], None);
        (tensor.data_ptr() as usize, tensors::to_bytes(&all))
    };
    let contents = |argument: &Argument<'_>| match argument {
        Argument::Pointer(tensor) => tensor.map(contents),
        _ => None,
    };
    arguments.iter().map(contents).collect()
}

/// Returns the memory ranges of all tensors, ordered by address; overlapping ranges are merged.
fn buffers(contents: &Contents) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> =
        contents.iter().flatten().map(|(start, bytes)| *start..start + bytes.len()).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    ranges.dedup();
    let mut buffers: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match buffers.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => buffers.push(range),
        }
    }
    buffers
}

fn of_buffer(buffer: &Range<usize>, contents: &Contents) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    for (start, own) in contents.iter().flatten() {
        if buffer.start <= *start && start + own.len() <= buffer.end {
            bytes[start - buffer.start..][..own.len()].copy_from_slice(own);
        }
    }
    bytes
}

/// A sanitizer of the compiler.
#[derive(Debug, Clone, Copy)]
enum Sanitizer {
    /// Finds data races.
    Thread,
    /// Finds accesses outside of buffers, and undefined behaviour.
    Address,
}

/// Compiles `replay.cpp` with these kernels in `folder`.
fn program(folder: &Path, kernels: &str, sanitizer: Sanitizer) -> PathBuf {
    let flags: &[&str] = match sanitizer {
        Sanitizer::Thread => &["-fsanitize=thread"],
        Sanitizer::Address => &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    };
    build(folder, "replay.cpp", kernels, &[&["-O1", "-g"], flags].concat())
}

impl Recorded {
    /// Runs all launches, with threads in an order that follows from `seed`.
    fn replay(&self, program: &Path, seed: u64) -> Output {
        let run = |mut command: Command| {
            command.arg(self.folder.path().join("recording")).arg(seed.to_string());
            command.env("TSAN_OPTIONS", "halt_on_error=1").output().unwrap()
        };
        let output = run(Command::new(program));
        if !String::from_utf8_lossy(&output.stderr).contains("unexpected memory mapping") {
            return output;
        }
        // If the kernel randomizes more address bits than the thread sanitizer supports, it needs a process without
        // randomization.
        let mut command = Command::new("setarch");
        command.arg("-R").arg(program);
        run(command)
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::recorded;
    use super::*;
    use crate::device::{KERNELS, check_kernels};
    use crate::model::tests::on_device::take_steps;

    #[test]
    fn kernels_have_no_races_and_keep_to_their_memory() {
        let recorded = recorded(|accelerator| {
            for seed in 0..3 {
                check_kernels(accelerator, seed).unwrap();
            }
            take_steps(accelerator);
        });
        let check = |sanitizer: Sanitizer| {
            let folder = tempfile::tempdir().unwrap();
            let program = program(folder.path(), KERNELS, sanitizer);
            let output = recorded.replay(&program, 1);
            assert!(
                output.status.success(),
                "{sanitizer:?}: {}\n{}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), recorded.launches.to_string());
        };
        assert!(recorded.launches > 100);
        std::thread::scope(|scope| {
            scope.spawn(|| check(Sanitizer::Thread));
            check(Sanitizer::Address);
        });
    }

    /// Replays kernels that are broken on purpose.
    #[test]
    fn sanitizers_find_what_is_broken() {
        let recorded =
            recorded(|accelerator| (1..3).for_each(|seed| drop(check_kernels(accelerator, seed).unwrap())));
        let find = |sanitizer: Sanitizer, [right, wrong]: [&str; 2], found: &[&str]| {
            assert_eq!(KERNELS.matches(right).count(), 1, "{right}");
            let folder = tempfile::tempdir().unwrap();
            let program = program(folder.path(), &KERNELS.replace(right, wrong), sanitizer);
            let output = recorded.replay(&program, 1);
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{wrong}: not found");
            assert!(found.iter().all(|found| text.contains(found)), "{wrong}: {text}");
        };
        let race = "ThreadSanitizer: data race";
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The threads of all chunks write to the same address.
                let right = "sums[begin * dim + column] = sum;";
                let wrong = "sums[begin * dim + column] = sum; sums[column] = sum;";
                find(Sanitizer::Thread, [right, wrong], &[race, "in sum_chunks"]);
                // A thread reads a value that its neighbour writes.
                let right = "    steps[place] = rate /";
                let wrong = "    steps[place] = (place ? steps[place - 1] : 0.0f) + rate /";
                find(Sanitizer::Thread, [right, wrong], &[race, "in accumulate_rows"]);
            });
            // The last row reads one sample too many.
            let right = "k < ends[row]; k++) sum += values[order[k]";
            let wrong = "k <= ends[row]; k++) sum += values[order[k]";
            find(Sanitizer::Address, [right, wrong], &["AddressSanitizer: heap-buffer-overflow", "in fold"]);
        });
    }
}
