//! An executor: runs the tasks of plans on one machine, within a memory limit.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use arrow_flight::flight_service_server::FlightServiceServer;
use ballista_core::config::TaskSchedulingPolicy;
use ballista_core::error::BallistaError;
use ballista_core::extension::SessionConfigExt;
use ballista_core::registry::BallistaFunctionRegistry;
use ballista_core::utils::create_grpc_server;
use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};
use ballista_executor::flight_service::BallistaFlightService;
use datafusion::error::Result;
use datafusion::prelude::SessionConfig;
use onefold_base::address::{Address, Listening};
use onefold_base::process::available_threads;
use onefold_base::sync::locked;
use onefold_base::units::parse_bytes;
use onefold_ingest::executor::{executor_runtime, functions};
use onefold_ingest::remote::Stores;
use onefold_terminal::Printer;
use tonic::transport::server::TcpIncoming;

use crate::MESSAGE_BYTES;
use crate::codec::PlanCodec;
use crate::engine::Engine;
use crate::tls::{Tls, TlsArguments};

/// Executors ask the scheduler for tasks. If the scheduler pushed tasks, Ballista 55 could leave the tasks of a lost
/// executor waiting forever, because no event offers them to the others. Executors would also need their own server for
/// tasks, which does not support TLS.
pub(crate) const POLICY: TaskSchedulingPolicy = TaskSchedulingPolicy::PullStaged;
/// The number of seconds for which a new executor tries to connect to its scheduler.
const CONNECT_SECONDS: u16 = 30;
/// The divisor of a thread's memory that gives the bytes of rows that an exchange collects before it writes them.
const EXCHANGE_PART: u64 = 4;

/// The arguments of `executor`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExecutorArguments {
    /// The scheduler, as `HOST:PORT`
    #[arg(long, value_name = "HOST:PORT")]
    scheduler: Address,
    /// Memory for the work of all tasks; sorts and exchanges write to disk beyond it
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4GiB")]
    memory_limit: u64,
    /// Directory for exchanges between machines, and for data that does not fit into memory
    #[arg(long, value_name = "DIR")]
    work_dir: PathBuf,
    /// Number of threads [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    bind: IpAddr,
    /// Name or address by which other processes reach this one [default: that of `--bind`]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Port for exchanges; any free one if 0
    #[arg(long, default_value_t = 50051)]
    port: u16,
    #[command(flatten)]
    tls: TlsArguments,
}

/// Runs an executor until it receives a signal to end.
pub(crate) async fn run(arguments: &ExecutorArguments, printer: &Printer) -> anyhow::Result<()> {
    let threads = arguments.threads.map_or_else(available_threads, usize::from);
    let tls = arguments.tls.load()?;
    onefold_storage::path_on_disk(
        &arguments.work_dir,
        "an executor spills to a local disk",
        "give a local path",
    )?;
    fs_err::create_dir_all(&arguments.work_dir)?;
    let (runtime, memory) =
        executor_runtime(arguments.memory_limit, threads, &arguments.work_dir, Arc::new(Stores::default()))?;
    let exchange_bytes = arguments.memory_limit / threads as u64 / EXCHANGE_PART;
    let incoming = listen(arguments.bind, arguments.port)?;
    let port = incoming.local_addr()?.port();
    let host = arguments.host.clone().unwrap_or_else(|| arguments.bind.to_string());
    let address = format!("{host}:{port}");
    let text = format!("executor at {address}, with tasks from the scheduler {}", arguments.scheduler);
    printer.summary(&text, &Listening { address })?;
    let config = ExecutorProcessConfig {
        bind_host: arguments.bind.to_string(),
        external_host: Some(host),
        port,
        scheduler_host: arguments.scheduler.host.clone(),
        scheduler_port: arguments.scheduler.port,
        scheduler_connect_timeout_seconds: CONNECT_SECONDS,
        vcores: threads,
        task_scheduling_policy: POLICY,
        work_dir: Some(arguments.work_dir.to_string_lossy().into_owned()),
        job_data_ttl_seconds: 24 * 3600,
        job_data_clean_up_interval_seconds: 600,
        grpc_max_decoding_message_size: MESSAGE_BYTES,
        grpc_max_encoding_message_size: MESSAGE_BYTES,
        // All tasks share the memory pool of the runtime below.
        memory_pool_size: Some(0),
        override_execution_engine: Some(Arc::new(Engine::new(exchange_bytes))),
        override_function_registry: Some(Arc::new(registry()?)),
        override_runtime_producer: Some(Arc::new(move |_: &SessionConfig| Ok(Arc::clone(&runtime)))),
        override_config_producer: Some(config_producer(tls.as_ref())),
        override_physical_codec: Some(PlanCodec::new("executor", Some(memory))),
        override_arrow_flight_service: Some(flight_service(incoming, tls.as_ref())),
        override_create_grpc_client_endpoint: tls.as_ref().map(Tls::endpoints),
        ..ExecutorProcessConfig::default()
    };
    start_executor_process(Arc::new(config)).await.map_err(|error| {
        anyhow::anyhow!("{error}")
            .context(format!("the executor of scheduler {} stopped", arguments.scheduler))
    })
}

/// Returns a function that makes session configurations.
pub(crate) fn config_producer(tls: Option<&Tls>) -> ballista_core::ConfigProducer {
    let endpoints = tls.map(Tls::endpoints);
    Arc::new(move || {
        let config = SessionConfig::new_with_ballista();
        match &endpoints {
            Some(endpoints) => config
                .with_ballista_use_tls(true)
                .with_ballista_override_create_grpc_client_endpoint(Arc::clone(endpoints)),
            None => config,
        }
    })
}

/// Returns the SQL functions of DataFusion and of `onefold-ingest`.
fn registry() -> Result<BallistaFunctionRegistry> {
    let mut registry = BallistaFunctionRegistry::default();
    for function in functions()? {
        registry.scalar_functions.insert(function.name().to_owned(), function);
    }
    Ok(registry)
}

/// Binds `port`, or any free port if it is 0. Ballista would bind it only after it has reached the scheduler, and
/// another process could take the port before then.
fn listen(address: IpAddr, port: u16) -> anyhow::Result<TcpIncoming> {
    TcpIncoming::bind((address, port).into())
        .with_context(|| format!("port {port} of {address} cannot be listened on"))
}

/// Returns a function that serves the files of exchanges, with TLS if `tls` is given.
fn flight_service(
    incoming: TcpIncoming,
    tls: Option<&Tls>,
) -> Arc<ballista_executor::ArrowFlightServerProvider> {
    let (incoming, tls) = (Mutex::new(Some(incoming)), tls.cloned());
    Arc::new(move |work_dir, _, mut shutdown, config| {
        let incoming = locked(&incoming).take();
        let tls = tls.as_ref().map(Tls::server);
        tokio::spawn(async move {
            let incoming = incoming
                .ok_or_else(|| BallistaError::General("exchanges are served already".to_owned()))?
                .with_nodelay(Some(true))
                .with_keepalive(Some(Duration::from_secs(config.tcp_keepalive_seconds)));
            let service = FlightServiceServer::new(BallistaFlightService::new(work_dir))
                .max_decoding_message_size(MESSAGE_BYTES as usize)
                .max_encoding_message_size(MESSAGE_BYTES as usize);
            let mut server = create_grpc_server(&config);
            if let Some(tls) = tls {
                server = server.tls_config(tls).map_err(BallistaError::TonicError)?;
            }
            let serving = server.add_service(service).serve_with_incoming_shutdown(incoming, shutdown.recv());
            serving.await.map_err(BallistaError::TonicError)
        })
    })
}
