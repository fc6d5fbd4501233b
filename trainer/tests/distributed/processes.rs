//! Ranks that are processes: this program is started again with the name of a scenario in [`SCENARIO`].

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the processes tell the tests what they see")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use onefold_trainer::distributed::{Collectives, Environment, Timeouts, check_collectives, launch};
use onefold_trainer::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::operations::check_operations;

/// The variable with the scenario of a started process.
const SCENARIO: &str = "ONEFOLD_TEST_SCENARIO";
/// The variable with additional variables for the ranks of a launcher, as `NAME=VALUE NAME=VALUE`.
const VARIABLES: &str = "ONEFOLD_TEST_VARIABLES";
/// The time after which a test fails, and kills the processes that it started.
const LIMIT: Duration = Duration::from_secs(300);

/// The entry point of every process that a test starts. When it runs as a test, it does nothing.
#[test]
fn child() {
    let Ok(scenario) = std::env::var(SCENARIO) else { return };
    let ended = match scenario.split_once(' ') {
        Some(("launch", task)) => launched(task),
        _ => rank(&scenario),
    };
    if let Err(error) = &ended {
        // A single write, because ranks that end at the same time write to the same pipe.
        let _ = std::io::stderr().write_all(format!("error: {error}\n").as_bytes());
    }
    std::process::exit(i32::from(ended.is_err()));
}

/// Runs a launcher of three ranks; `task` has the seconds of its patience, and the scenario of the ranks.
fn launched(task: &str) -> Result<()> {
    let (patience, scenario) = task.split_once(' ').expect("a patience and a scenario");
    let patience = Duration::from_secs(patience.parse().expect("a number of seconds"));
    let program = std::env::current_exe()?;
    let more = std::env::var(VARIABLES).unwrap_or_default();
    let rank = || {
        // `env` replaces variables that the launcher sets.
        let mut rank = Command::new("env");
        rank.args(more.split_whitespace()).arg(format!("{SCENARIO}={scenario}")).arg(&program).args(CHILD);
        rank
    };
    for exit in launch(3, rank, patience)? {
        eprintln!("rank {}: {}, killed: {}", exit.rank, exit.status, exit.killed);
    }
    Ok(())
}

const CHILD: [&str; 3] = ["processes::child", "--exact", "--nocapture"];

/// Runs a rank of a job.
fn rank(scenario: &str) -> Result<()> {
    // Longer than any operation takes on a busy machine.
    let timeouts = Timeouts { join: Duration::from_secs(300), operation: Duration::from_secs(120) };
    if let Some(libtorch) = scenario.strip_prefix("nccl ") {
        return nccl(libtorch, timeouts);
    }
    let timeouts = match scenario {
        "alone" => Timeouts { join: Duration::from_secs(2), ..timeouts },
        "never joins" => Timeouts { join: 2 * LIMIT, ..timeouts },
        // Only this limit ends an operation.
        "stops" | "sleeps" | "stopped host" => Timeouts { operation: Duration::from_secs(10), ..timeouts },
        _ => timeouts,
    };
    let mut environment = Environment::read()?;
    if scenario == "other version" && environment.rank == 2 {
        environment.version = "0.0.1".to_owned();
    }
    if scenario == "ignores signals" {
        // SAFETY: this is a system call.
        unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
    }
    if scenario == "never joins" && environment.rank == 1 {
        send(std::process::id(), libc::SIGKILL);
    }
    let ranks = environment.join(timeouts)?.collectives();
    println!("rank {} is process {}", ranks.rank(), std::process::id());
    if let Some(seed) = scenario.strip_prefix("operations ") {
        return check_operations(&*ranks, seed.parse().unwrap(), 200);
    }
    for step in 1..=5 {
        ranks.set_step(step);
        sum(&*ranks)?;
    }
    if scenario == "ignores" {
        // Only the launcher notices that rank 1 has ended.
        if ranks.rank() == 1 {
            std::process::exit(9);
        }
        std::thread::sleep(LIMIT);
    }
    if ranks.rank() == 1 {
        misbehave(&*ranks, scenario)?;
    }
    loop {
        sum(&*ranks)?;
    }
}

/// Connects through NCCL and uses it, if there is a GPU.
fn nccl(libtorch: &str, timeouts: Timeouts) -> Result<()> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: the program loads it in the same way when it opens a GPU, which needs a GPU.
    let library = unsafe { Library::open(Some(libtorch), RTLD_NOW | RTLD_GLOBAL) };
    std::mem::forget(library.expect("libtorch_cuda.so is loaded"));
    let device = Device::Cuda(0);
    let ranks = Environment::read()?.join(timeouts)?.on_device(device)?;
    check_collectives(&*ranks, device, 1)
}

/// Sums rank numbers, and runs an exchange at the same time.
fn sum(ranks: &dyn Collectives) -> Result<()> {
    let size = i64::from(ranks.size());
    let tensor = Tensor::full([1000 * size], i64::from(ranks.rank()), (Kind::Float, Device::Cpu));
    let received = tensor.zeros_like();
    let splits = vec![1000; size as usize];
    let exchanged = ranks.all_to_all(&received, &splits, &tensor, &splits)?;
    let sum = Tensor::from_slice(&[i64::from(ranks.rank())]);
    let summed = ranks.all_reduce(&sum)?;
    exchanged.wait()?;
    summed.wait()?;
    assert_eq!(i64::try_from(&sum).unwrap(), size * (size - 1) / 2);
    Ok(())
}

fn misbehave(ranks: &dyn Collectives, scenario: &str) -> Result<()> {
    match scenario {
        "dies" => std::process::exit(9),
        "stops" => send(std::process::id(), libc::SIGSTOP),
        "sleeps" => std::thread::sleep(LIMIT),
        "aborts" => {
            ranks.abort("the loss is NaN");
            return Err(Error::collective("none", "the loss is NaN"));
        }
        _ => {}
    }
    Ok(())
}

/// Sends a signal to this process, or to a child that has not been waited for.
fn send(process: u32, signal: i32) {
    // SAFETY: this is a system call; the id cannot belong to another process.
    unsafe { libc::kill(process as libc::pid_t, signal) };
}

/// Processes that are killed when a test ends.
struct Job(Vec<Child>);

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn command(scenario: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(CHILD).env(SCENARIO, scenario).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Returns a port on which nothing listens. It is below the range from which the system assigns ports for
/// `connect` and for `bind` with port 0, so that no other process gets it before it is used. Different calls
/// return different ports.
fn free_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    // Concurrent test programs start at different ports.
    let start = std::process::id() % 20_000 * 199;
    loop {
        let tried = TRIED.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + ((start + tried) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl Job {
    /// Starts `size` ranks; rank 0 hosts the store.
    fn start(size: u32, scenario: &str) -> Self {
        Self::start_at(free_port(), size, scenario)
    }

    fn start_at(port: u16, size: u32, scenario: &str) -> Self {
        let port = port.to_string();
        let start = |rank: u32| {
            let mut command = command(scenario);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
            command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port);
            command.env_remove("TORCHELASTIC_USE_AGENT_STORE").spawn().unwrap()
        };
        Self((0..size).map(start).collect())
    }

    /// Waits for these processes. Returns each one's exit code and stderr.
    fn ended<const N: usize>(&mut self, indices: [usize; N]) -> [(Option<i32>, String); N] {
        let deadline = Instant::now() + LIMIT;
        let ended = |child: &mut Child| child.try_wait().unwrap().is_some();
        while !indices.iter().all(|index| ended(&mut self.0[*index])) {
            assert!(Instant::now() < deadline, "processes hang");
            std::thread::sleep(Duration::from_millis(20));
        }
        indices.map(|index| {
            let mut text = String::new();
            self.0[index].stderr.take().unwrap().read_to_string(&mut text).unwrap();
            (self.0[index].wait().unwrap().code(), text)
        })
    }
}

#[test]
fn operations_of_processes_equal_their_references() {
    for size in 1..5 {
        let mut job = Job::start(size, &format!("operations {size}"));
        for index in 0..size as usize {
            let [(code, text)] = job.ended([index]);
            assert_eq!((code, text.as_str()), (Some(0), ""));
        }
    }
}

/// Runs three ranks of which rank 1 misbehaves. Returns the report of rank 0; the other rank must only refer to
/// it.
fn with_rank_1_lost(scenario: &str) -> String {
    let mut job = Job::start(3, scenario);
    let [(first, report), (second, follows)] = job.ended([0, 2]);
    assert_eq!((first, second), (Some(1), Some(1)), "{report}\n{follows}");
    assert_eq!(follows, "error: ended because of rank 1, as rank 0 reports\n");
    report
}

#[test]
fn a_rank_that_dies_ends_the_others() {
    let report = with_rank_1_lost("dies");
    assert!(report.starts_with("error: rank 1 was lost at step 5: "), "{report}");
    let closed = ["Connection closed by peer", "Connection reset by peer", "Broken pipe"];
    assert!(closed.iter().any(|closed| report.contains(closed)), "{report}");
}

#[test]
fn a_rank_that_is_stopped_ends_the_others() {
    let report = with_rank_1_lost("stops");
    assert!(report.starts_with("error: rank 1 was lost at step 5: "), "{report}");
    assert!(report.contains("had no answer within 10s"), "{report}");
}

#[test]
fn a_rank_that_does_not_come_ends_the_others() {
    let report = with_rank_1_lost("sleeps");
    assert!(report.starts_with("error: rank 1 was lost at step 5: "), "{report}");
    assert!(report.contains("had no answer within 10s"), "{report}");
}

#[test]
fn a_rank_with_an_error_of_its_own_ends_the_others_with_it() {
    let report = with_rank_1_lost("aborts");
    assert_eq!(report, "error: rank 1 ended at step 5: the loss is NaN\n");
}

#[test]
fn the_loss_of_the_stores_host_ends_the_others() {
    let lost = |signal: i32, scenario: &str| {
        let mut job = Job::start(3, scenario);
        job.0.iter_mut().for_each(|child| {
            read_process(child);
        });
        send(job.0[0].id(), signal);
        let [(first, report), (second, follows)] = job.ended([1, 2]);
        assert_eq!((first, second), (Some(1), Some(1)), "{report}\n{follows}");
        assert!(report.starts_with("error: rank 0 was lost at step "), "{report}");
        assert_eq!(follows, "error: ended because of rank 0, as rank 1 reports\n");
    };
    // Concurrently, because both wait for seconds.
    std::thread::scope(|scope| {
        scope.spawn(|| lost(libc::SIGKILL, "works"));
        scope.spawn(|| lost(libc::SIGSTOP, "stopped host"));
    });
}

#[test]
fn a_port_in_use_is_an_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = command("alone");
    command.env("RANK", "0").env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", taken.local_addr().unwrap().port().to_string());
    let mut job = Job(vec![command.spawn().unwrap()]);
    let [(code, text)] = job.ended([0]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("rank 0 cannot listen at 127.0.0.1:") && text.contains("in use"), "{text}");
    assert!(text.contains("hint: choose another MASTER_PORT"), "{text}");
}

#[test]
fn ranks_of_another_version_are_refused() {
    let mut job = Job::start(3, "other version");
    let [(first, report), (second, follows), (third, also)] = job.ended([0, 1, 2]);
    assert_eq!((first, second, third), (Some(1), Some(1), Some(1)), "{report}\n{follows}\n{also}");
    assert!(report.starts_with("error: rank 2 runs version \"0.0.1\" of the program, rank 0 "), "{report}");
    assert!(report.contains("hint: install one version"), "{report}");
    for follows in [follows, also] {
        assert_eq!(follows, "error: ended because of rank 0, as rank 0 reports\n");
    }
}

/// The ranks of a second job get the address of a running job: each of its processes reports the problem, and
/// the first job continues.
#[test]
fn a_second_job_at_the_place_of_the_first_is_refused() {
    let port = free_port();
    let mut first = Job::start_at(port, 2, "works");
    first.0.iter_mut().for_each(|child| {
        read_process(child);
    });
    let mut second = Job::start_at(port, 2, "works");
    let [(code, text), (other_code, other)] = second.ended([0, 1]);
    assert_eq!((code, other_code), (Some(1), Some(1)), "{text}\n{other}");
    assert!(text.contains("rank 0 cannot listen at localhost:") && text.contains("another job"), "{text}");
    assert!(
        other.contains("two processes of the job have the rank 1") && other.contains("MASTER_PORT"),
        "{other}"
    );
    assert!(first.0.iter_mut().all(|child| child.try_wait().unwrap().is_none()), "the first job has ended");
}

#[test]
fn missing_ranks_are_named() {
    // Concurrently, because both wait for seconds.
    let jobs = [("0", "ranks 1 and 2 were missing"), ("1", "cannot reach the job's store")];
    let jobs = jobs.map(|(rank, expected)| {
        let mut command = command("alone");
        command.env("RANK", rank).env("WORLD_SIZE", "3").env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", free_port().to_string());
        (Job(vec![command.spawn().unwrap()]), expected)
    });
    for (mut job, expected) in jobs {
        let [(code, text)] = job.ended([0]);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_rank_without_an_address_is_an_error() {
    let mut command = command("alone");
    command.env("RANK", "0").env("WORLD_SIZE", "2").env_remove("MASTER_ADDR");
    let mut job = Job(vec![command.spawn().unwrap()]);
    let [(code, text)] = job.ended([0]);
    assert_eq!(code, Some(1));
    assert!(
        text.starts_with("error: RANK is 0, but the environment variable MASTER_ADDR is not set"),
        "{text}"
    );
}

/// Reads "rank R is process P" from a process's stdout. Returns P.
fn read_process(child: &mut Child) -> i32 {
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
    loop {
        let mut line = String::new();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the process ended");
        if let Some((_, process)) = line.trim().split_once(" is process ") {
            return process.parse().unwrap();
        }
    }
}

/// Starts a launcher. Its ranks are running when this returns.
fn launcher(scenario: &str) -> Job {
    let mut job = Job(vec![command(&format!("launch {scenario}")).spawn().unwrap()]);
    read_process(&mut job.0[0]);
    job
}

#[test]
fn a_launched_rank_that_dies_ends_the_job() {
    let [(code, text)] = launcher("200 dies").ended([0]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(text.matches("error: rank 1 was lost at step 5: ").count(), 1, "{text}");
    assert!(text.contains("rank 1: exit status: 9, killed: false"), "{text}");
    for rank in [0, 2] {
        assert!(text.contains(&format!("rank {rank}: exit status: 1, killed: false")), "{text}");
    }
}

/// The ranks do not wait for a rank that has ended: the test's limit is less than the patience of the launcher
/// and the ranks.
#[test]
fn a_rank_that_is_killed_before_it_joins_ends_the_job() {
    let mut job = Job(vec![command("launch 1000 never joins").spawn().unwrap()]);
    let [(code, text)] = job.ended([0]);
    assert_eq!(code, Some(1), "{text}");
    let own: Vec<_> =
        text.lines().filter(|line| !line.starts_with("error: ended because of rank 1")).collect();
    assert_eq!(own[0], "error: signal 9 ended rank 1 before all ranks had joined", "{text}");
    assert!(own[1].starts_with("  hint: look for what sent it"), "{text}");
}

#[test]
fn ranks_that_do_not_end_are_killed() {
    let [(_, text)] = launcher("1 ignores").ended([0]);
    assert!(text.contains("rank 1: exit status: 9, killed: false"), "{text}");
    for rank in [0, 2] {
        assert!(text.contains(&format!("rank {rank}: signal: 9 (SIGKILL), killed: true")), "{text}");
    }
}

#[test]
fn a_launcher_passes_signals_on() {
    let mut job = launcher("30 works");
    send(job.0[0].id(), libc::SIGTERM);
    let [(code, text)] = job.ended([0]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("signal: 15 (SIGTERM), killed: false"), "{text}");
}

/// The launcher waits for ranks that work on after the first signal.
#[test]
fn a_second_signal_kills_the_ranks() {
    let mut job = launcher("1000 ignores signals");
    let launcher = job.0[0].id();
    send(launcher, libc::SIGTERM);
    send(launcher, libc::SIGINT);
    let [(code, text)] = job.ended([0]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.starts_with("error: the ranks were killed, because a second signal came"), "{text}");
    assert!(text.contains("hint: the checkpoints that they had written are complete"), "{text}");
}

#[test]
fn no_rank_outlives_its_launcher() {
    let mut job = launcher("30 works");
    let mut output = job.0[0].stdout.take().unwrap();
    job.0[0].kill().unwrap();
    // The output ends when no rank has it open any more.
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(output.read_to_end(&mut Vec::new())));
    receiver.recv_timeout(LIMIT).expect("ranks still run").unwrap();
}

#[test]
fn the_network_interface_can_be_named() {
    // An address that is not recognized as a loopback address.
    let variables = |interface: &str| format!("MASTER_ADDR=::ffff:127.0.0.1 GLOO_SOCKET_IFNAME={interface}");
    for (interface, code) in [("lo", 0), ("no-such-interface", 1)] {
        let mut command = command("launch 200 operations 6");
        let mut job = Job(vec![command.env(VARIABLES, variables(interface)).spawn().unwrap()]);
        let [(_, text)] = job.ended([0]);
        for rank in 0..3 {
            assert!(text.contains(&format!("rank {rank}: exit status: {code}, killed: false")), "{text}");
        }
        assert_eq!(text.matches("could not connect to the others").count(), code, "{text}");
        assert_eq!(text.contains("; GLOO_SOCKET_IFNAME names"), code == 1, "{text}");
    }
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let error = launch(2, || Command::new("no-such-program"), Duration::ZERO).unwrap_err().to_string();
    assert!(error.starts_with("rank 0 could not be started: `no-such-program`"), "{error}");
}

/// Starts ranks with torch's own launcher, which hosts the store.
fn torchrun(scenario: &str) -> Job {
    let torch = std::env::var("ONEFOLD_TORCHREC").expect("`make test-torchrec` sets ONEFOLD_TORCHREC");
    let mut command = Command::new("python3");
    command.args(["-m", "torch.distributed.run", "--nproc-per-node=3", "--master-addr=127.0.0.1"]);
    command.arg(format!("--master-port={}", free_port())).arg("--no-python");
    command.arg(std::env::current_exe().unwrap()).args(CHILD);
    command.env("PYTHONPATH", torch).env(SCENARIO, scenario);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Job(vec![command.spawn().unwrap()])
}

/// `cuda.sh` builds the library for NCCL process groups. The real libtorch, NCCL and CUDA have all symbols that
/// it needs, and a call gets as far as the GPU.
#[test]
#[ignore = "needs PyPI's torch: make test-torchrec"]
fn nccl_of_torchrecs_torch_is_loaded() {
    let packages = std::env::var("ONEFOLD_TORCHREC").expect("`make test-torchrec` sets ONEFOLD_TORCHREC");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda.sh");
    let built = Command::new(script).arg(&packages).stderr(Stdio::inherit()).output().unwrap();
    assert!(built.status.success());
    let library = String::from_utf8(built.stdout).unwrap();
    let mut command = command(&format!("nccl {packages}/torch/lib/libtorch_cuda.so"));
    command.env("ONEFOLD_CUDA", library.trim());
    command.env("RANK", "0").env("WORLD_SIZE", "1");
    command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", free_port().to_string());
    command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
    let [(code, text)] = Job(vec![command.spawn().unwrap()]).ended([0]);
    if fs_err::exists("/dev/nvidia0").unwrap_or(false) {
        assert_eq!(code, Some(0), "{text}");
    } else {
        let expected =
            "error: NCCL cannot connect rank 0: ProcessGroupNCCL is only supported with GPUs, no GPUs found!";
        assert!(code == Some(1) && text.contains(expected), "{text}");
    }
}

#[test]
#[ignore = "needs PyPI's torch: make test-torchrec"]
fn torchrun_of_torchrecs_torch_starts_ranks() {
    let [(code, text)] = torchrun("operations 5").ended([0]);
    assert_eq!(code, Some(0), "{text}");
    let [(code, text)] = torchrun("aborts").ended([0]);
    assert_eq!(code, Some(1), "{text}");
    assert_eq!(text.matches("error: rank 1 ended at step 5: the loss is NaN\n").count(), 1, "{text}");
}
