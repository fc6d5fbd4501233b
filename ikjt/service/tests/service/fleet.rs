//! Runs a master and workers as processes.

use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use onefold_tests::{Dir, S3Server, TestCommand, free_port};
use serde_json::Value;

/// The time limit for a process to start listening, or to reach a state.
pub(crate) const START: Duration = Duration::from_secs(300);

/// A service. Its processes end when it is dropped.
pub(crate) struct Fleet<'a> {
    dir: &'a Dir,
    server: Option<&'a S3Server>,
    options: String,
    /// The options of workers that are started from now on.
    pub(crate) of_workers: String,
    port: u16,
    master: Child,
    workers: Vec<Child>,
}

impl<'a> Fleet<'a> {
    /// Starts a master and `workers` workers with one thread each.
    pub(crate) fn new(dir: &'a Dir, workers: usize) -> Self {
        Self::with(dir, workers, None, "", "")
    }

    /// Does the same as [`new`](Self::new), with an S3 server for the workers, options for all processes, and options
    /// for the master.
    pub(crate) fn with(
        dir: &'a Dir,
        workers: usize,
        server: Option<&'a S3Server>,
        options: &str,
        of_master: &str,
    ) -> Self {
        let port = free_port();
        let options = options.to_owned();
        let master = dir.command(&master_line(port, &format!("{options} {of_master}"))).spawn();
        let of_workers = "--memory-limit 256MiB".to_owned();
        let mut fleet = Self { dir, server, options, of_workers, port, master, workers: Vec::new() };
        fleet.wait_for_master();
        (0..workers).for_each(|_| fleet.start_worker());
        fleet
    }

    fn wait_for_master(&self) {
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(started.elapsed() < START, "the master does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts another worker.
    pub(crate) fn start_worker(&mut self) {
        let line = format!(
            "onefold-serve worker --master {} --threads 1 {} {}",
            self.address(),
            self.of_workers,
            self.options
        );
        let command = self.dir.command(&line);
        let command = match self.server {
            Some(server) => command.with_s3(server),
            None => command,
        };
        self.workers.push(command.spawn());
    }

    /// Kills the oldest worker, as the kernel does when memory runs out.
    pub(crate) fn kill_worker(&mut self) {
        end(&mut self.workers.remove(0));
    }

    /// Sends a signal to a worker, given by its index among the running workers.
    pub(crate) fn signal(&self, worker: usize, signal: &str) {
        let process = self.workers[worker].id().to_string();
        let sent = std::process::Command::new("kill").args(["-s", signal, &process]).status().unwrap();
        assert!(sent.success(), "{signal}");
    }

    /// Returns the peak resident memory of a worker in bytes.
    pub(crate) fn peak_memory(&self, worker: usize) -> u64 {
        let status = fs_err::read_to_string(format!("/proc/{}/status", self.workers[worker].id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Waits until the oldest worker has ended on its own.
    pub(crate) fn wait_for_end(&mut self) {
        let started = Instant::now();
        while self.workers[0].try_wait().unwrap().is_none() {
            assert!(started.elapsed() < START, "the worker does not end");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(self.workers.remove(0).wait().unwrap().success());
    }

    /// Kills the master.
    pub(crate) fn kill_master(&mut self) {
        end(&mut self.master);
    }

    /// Restarts the master on the same port.
    pub(crate) fn restart_master(&mut self) {
        self.master = self.dir.command(&master_line(self.port, &self.options)).spawn();
    }

    /// Returns `HOST:PORT` of the master.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the URL of a dataset in the folder.
    pub(crate) fn url(&self, dataset: &str) -> String {
        format!("grpc://{}/{}", self.address(), self.dir.path(dataset).display())
    }

    /// Returns the status of the service from the master.
    pub(crate) fn status(&self) -> Value {
        self.command(&format!("onefold-serve status --master {} {}", self.address(), self.options)).json()
    }

    /// Waits until the service has this many workers, and returns the master's status at that time. A later status
    /// may have fewer workers, because the master drops a worker that has not reported for seconds.
    pub(crate) fn wait_for_workers(&self, workers: usize) -> Value {
        self.wait_for(&format!("there are {workers} workers"), |status| {
            status["workers"].as_array().map(Vec::len) == Some(workers)
        })
    }

    /// Waits until the status of the service satisfies `holds`, and returns it.
    #[track_caller]
    pub(crate) fn wait_for(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let status = self.status();
            if holds(&status) {
                return status;
            }
            assert!(started.elapsed() < START, "{what}: {status}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the name of a client that reads, which is another one in each epoch.
    pub(crate) fn client(&self) -> Value {
        let status = self.wait_for("a client reads", |status| !status["clients"][0].is_null());
        status["clients"][0]["client"].clone()
    }

    /// Waits until the only reader of the service has finished an epoch.
    pub(crate) fn wait_for_progress(&self) {
        let client = self.client();
        self.wait_for("the client finishes its epoch", |status| is_another_client(&client, status));
    }

    /// Returns a command in the folder. It is killed if it hangs.
    pub(crate) fn command(&self, line: &str) -> TestCommand {
        self.dir.command(line).with_time_limit(900)
    }
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        self.workers.iter_mut().chain([&mut self.master]).for_each(end);
    }
}

/// Returns whether another client than `client` reads now.
pub(crate) fn is_another_client(client: &Value, status: &Value) -> bool {
    let now = &status["clients"][0]["client"];
    !now.is_null() && now != client
}

fn end(process: &mut Child) {
    // The process may have ended already.
    let _ = process.kill();
    let _ = process.wait();
}

fn master_line(port: u16, options: &str) -> String {
    format!("onefold-serve master --listen 127.0.0.1:{port} {options}")
}
