//! Resources that this process may use and has used, and conversion of panics of foreign code into errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code that may panic on its input, such as a foreign decoder. A panic becomes an error with the panic's
/// message.
///
/// # Errors
///
/// The error of `work`, or the message of its panic.
pub fn catch_panic<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_text(&*panic).to_owned()))
}

/// Returns the message of a caught panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

/// Returns the name of this machine's processor with `threads` threads, as used in topologies and cost models:
/// `AMD EPYC with AVX-512, 2 threads`. Clouds give processors of several generations one model name, so the name
/// contains the widest vector instructions.
pub fn hardware_name(threads: usize) -> String {
    let text = fs_err::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown processor", |(_, name)| name.trim());
    let vectors = if std::is_x86_feature_detected!("avx512f") { " with AVX-512" } else { "" };
    format!("{model}{vectors}, {threads} thread{}", if threads == 1 { "" } else { "s" })
}

/// Returns the largest resident set of this process so far, in bytes, or `None` if the kernel does not report it.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the processor time that this process has used, in seconds, or `None` if the kernel does not report it.
pub fn cpu_seconds() -> Option<f64> {
    let status = fs_err::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name in parentheses, which may contain anything.
    let fields = status.rsplit_once(')')?.1.split_ascii_whitespace();
    // User and system time are the 14th and 15th field, in hundredths of a second on every Linux.
    let ticks = fields.skip(11).take(2).map(|field| field.parse::<u64>().ok());
    Some(ticks.sum::<Option<u64>>()? as f64 / 100.0)
}

/// A thread of this process, and the processor time that the thread has used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ThreadSeconds {
    /// The thread id in the operating system.
    pub thread: u64,
    /// The processor time, in seconds.
    pub seconds: f64,
}

/// Returns the threads of this process whose names begin with `name`. The list is empty if the kernel does not report
/// them.
pub fn threads_named(name: &str) -> Vec<ThreadSeconds> {
    let Ok(threads) = fs_err::read_dir("/proc/self/task") else { return Vec::new() };
    let thread = |entry: std::io::Result<fs_err::DirEntry>| {
        let path = entry.ok()?.path();
        let its_name = fs_err::read_to_string(path.join("comm")).ok()?;
        let thread = path.file_name()?.to_str()?.parse().ok()?;
        // The first number is the time on a processor, in nanoseconds.
        let times = fs_err::read_to_string(path.join("schedstat")).ok()?;
        let nanoseconds: u64 = times.split_ascii_whitespace().next()?.parse().ok()?;
        its_name.starts_with(name).then_some(ThreadSeconds { thread, seconds: nanoseconds as f64 / 1e9 })
    };
    threads.filter_map(thread).collect()
}

/// Returns the number of threads that the machine offers: the default of every `--threads`.
pub fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_a_panic_is_found() {
        let caught = |panic: fn()| catch_unwind(panic).unwrap_err();
        assert_eq!(panic_text(&*caught(|| panic!("fixed"))), "fixed");
        assert_eq!(panic_text(&*caught(|| panic!("number {}", 7))), "number 7");
    }

    #[test]
    fn hardware_is_named_with_its_vector_instructions() {
        let flags = fs_err::read_to_string("/proc/cpuinfo").unwrap();
        let name = hardware_name(2);
        assert!(name.ends_with(", 2 threads"), "{name}");
        assert_eq!(name.contains(" with AVX-512"), flags.contains(" avx512f"), "{name}");
        assert!(hardware_name(1).ends_with(", 1 thread"));
    }

    #[test]
    fn processor_time_grows() {
        let before = cpu_seconds().unwrap();
        let started = std::time::Instant::now();
        while cpu_seconds().unwrap() == before {
            assert!(started.elapsed().as_secs() < 600, "a busy process uses processor time");
        }
    }

    #[test]
    fn peak_memory_is_known() {
        assert!(peak_rss_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
