//! A scheduler and executors as processes, and datasets that are compared.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use onefold_datasets::Snapshot;
use onefold_tests::{Dir, S3Server, TestCommand};

/// The time that a process has to start to listen.
const START: Duration = Duration::from_secs(60);

/// A cluster. Its processes end with it.
pub(crate) struct Fleet<'a> {
    dir: &'a Dir,
    /// Where executors work.
    scratch: Dir,
    server: Option<&'a S3Server>,
    options: String,
    port: u16,
    scheduler: Child,
    executors: Vec<Child>,
    /// Executors that were ever started.
    started: usize,
}

impl<'a> Fleet<'a> {
    /// A scheduler and so many executors.
    pub(crate) fn new(dir: &'a Dir, executors: usize) -> Self {
        Self::with(dir, executors, None, "")
    }

    /// The same with an S3 server that they reach, and options that all of their commands get.
    pub(crate) fn with(dir: &'a Dir, executors: usize, server: Option<&'a S3Server>, options: &str) -> Self {
        let port = free_port();
        let scheduler = scheduler(dir, port, options).spawn();
        let mut fleet = Self {
            dir,
            scratch: Dir::new(),
            server,
            options: options.to_owned(),
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

    /// Waits until a job is at work.
    pub(crate) fn wait_for_jobs(&self) {
        let started = Instant::now();
        while !self.get("/api/jobs").contains("\"Running\"") {
            assert!(started.elapsed() < START, "no job begins");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What the scheduler's REST API answers.
    pub(crate) fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Starts another executor, of one thread.
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

    /// Kills the oldest executor, as the kernel does when memory ends.
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
        self.scheduler = scheduler(self.dir, self.port, &self.options).spawn();
        self.wait();
    }

    /// Where the scheduler listens.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The command `line`, a build or an append.
    pub(crate) fn command(&self, line: &str) -> TestCommand {
        let scheduler = format!("--scheduler 127.0.0.1:{} --partitions 4 {}", self.port, self.options);
        self.reaching(self.dir.command(&format!("onefold-cluster {line} {scheduler}"))).with_time_limit(300)
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
            // It may have ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn scheduler(dir: &Dir, port: u16, options: &str) -> TestCommand {
    dir.command(&format!("onefold-cluster scheduler --port {port} --executor-timeout 8 {options}"))
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Every file of a dataset without the part of its name that no two writers share, with its checksum.
pub(crate) fn contents(dataset: &Path) -> Vec<(String, String)> {
    let snapshot = Snapshot::load(dataset).unwrap();
    let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let files = files.map(|file| {
        let name = file.path.rsplit_once('-').unwrap().0;
        (name.to_owned(), file.sha256.clone())
    });
    files.collect()
}
