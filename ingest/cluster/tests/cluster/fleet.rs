//! Starts a scheduler and executors as processes, and compares datasets.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use onefold_datasets::Snapshot;
use onefold_tests::{Dir, S3Server, TestCommand, free_port};

/// The time within which a process must listen.
const START: Duration = Duration::from_secs(300);
/// Seconds without a heartbeat after which a scheduler counts an executor as lost. An executor may get no processor
/// time for many seconds on a busy machine.
const EXECUTOR_TIMEOUT: u32 = 60;

/// A cluster. Its processes end when it is dropped.
pub(crate) struct Fleet<'a> {
    dir: &'a Dir,
    /// The folder for the work folders of executors.
    scratch: Dir,
    server: Option<&'a S3Server>,
    options: String,
    executor_timeout: u32,
    port: u16,
    scheduler: Child,
    executors: Vec<Child>,
    /// The number of executors that were started, including those that have ended.
    started: usize,
}

impl<'a> Fleet<'a> {
    /// Starts a scheduler and this number of executors.
    pub(crate) fn new(dir: &'a Dir, executors: usize) -> Self {
        Self::with(dir, executors, None, "")
    }

    /// Like [`new`](Self::new), with an S3 server that the executors reach, and options for all commands.
    pub(crate) fn with(dir: &'a Dir, executors: usize, server: Option<&'a S3Server>, options: &str) -> Self {
        Self::start(dir, executors, server, options, EXECUTOR_TIMEOUT)
    }

    /// Like [`new`](Self::new), with a scheduler that counts an executor as lost after 8 seconds.
    pub(crate) fn impatient(dir: &'a Dir, executors: usize) -> Self {
        Self::start(dir, executors, None, "", 8)
    }

    fn start(
        dir: &'a Dir,
        executors: usize,
        server: Option<&'a S3Server>,
        options: &str,
        executor_timeout: u32,
    ) -> Self {
        let port = free_port();
        let scheduler = scheduler(dir, port, executor_timeout, options).spawn();
        let mut fleet = Self {
            dir,
            scratch: Dir::new(),
            server,
            options: options.to_owned(),
            executor_timeout,
            port,
            scheduler,
            executors: Vec::new(),
            started: 0,
        };
        fleet.wait();
        (0..executors).for_each(|_| fleet.start_executor());
        fleet
    }

    /// Waits until the scheduler listens.
    fn wait(&self) {
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(started.elapsed() < START, "the scheduler does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until a job is running.
    pub(crate) fn wait_for_jobs(&self) {
        let started = Instant::now();
        while !self.get("/api/jobs").contains("\"Running\"") {
            assert!(started.elapsed() < START, "no job begins");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the answer of the scheduler's REST API.
    pub(crate) fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Starts another executor with one thread.
    pub(crate) fn start_executor(&mut self) {
        self.started += 1;
        let command = self.dir.command(&format!(
            "onefold-cluster executor --scheduler 127.0.0.1:{} --port 0 --threads 1 --memory-limit 256MiB \
             --work-dir {} {}",
            self.port,
            self.scratch.path(self.started.to_string()).display(),
            self.options
        ));
        self.executors.push(self.reaching(command).spawn());
    }

    /// Kills the oldest executor with SIGKILL, as the kernel does when memory runs out.
    pub(crate) fn kill_executor(&mut self) {
        let mut executor = self.executors.remove(0);
        executor.kill().unwrap();
        executor.wait().unwrap();
    }

    /// Kills the scheduler.
    pub(crate) fn kill_scheduler(&mut self) {
        self.scheduler.kill().unwrap();
        self.scheduler.wait().unwrap();
    }

    /// Starts the scheduler again.
    pub(crate) fn restart_scheduler(&mut self) {
        self.scheduler = scheduler(self.dir, self.port, self.executor_timeout, &self.options).spawn();
        self.wait();
    }

    /// Returns the address of the scheduler.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the command `line`, a build or an append, with the options of this cluster.
    pub(crate) fn command(&self, line: &str) -> TestCommand {
        let scheduler = format!("--scheduler 127.0.0.1:{} --partitions 4 {}", self.port, self.options);
        self.reaching(self.dir.command(&format!("onefold-cluster {line} {scheduler}"))).with_time_limit(1800)
    }

    fn reaching(&self, command: TestCommand) -> TestCommand {
        match self.server {
            Some(server) => command.with_s3(server),
            None => command,
        }
    }
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        for process in self.executors.iter_mut().chain([&mut self.scheduler]) {
            // The process may have ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn scheduler(dir: &Dir, port: u16, executor_timeout: u32, options: &str) -> TestCommand {
    let line =
        format!("onefold-cluster scheduler --port {port} --executor-timeout {executor_timeout} {options}");
    dir.command(&line)
}

/// Returns the files of a dataset with their bytes, by name without the part that is unique to each writer.
pub(crate) fn contents(dataset: &Path) -> Vec<(String, Vec<u8>)> {
    let snapshot = Snapshot::load(dataset).unwrap();
    let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let files = files.map(|set| {
        let name = set.path().rsplit_once('-').unwrap().0;
        (name.to_owned(), fs_err::read(dataset.join(set.path())).unwrap())
    });
    files.collect()
}
