//! A web service that enqueues, and works its jobs in the same process.

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use longshore::{Client, Context, Failure, Job, JobId, Worker};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

#[derive(Serialize, Deserialize)]
struct Welcome {
    to: String,
}

impl Job for Welcome {
    const KIND: &'static str = "welcome";
    type State = ();

    async fn run(self, _: Context) -> Result<(), Failure> {
        println!("welcome, {}", self.to);
        Ok(())
    }
}

/// Answers as soon as the job is stored.
async fn sign_up(State(jobs): State<Client>, Json(welcome): Json<Welcome>) -> Result<String, StatusCode> {
    let key = format!("welcome:{}", welcome.to); // a request sent twice makes one job
    let enqueued = jobs.enqueue(welcome).idempotency_key(key).await;
    enqueued.map(|job| job.id.to_string()).map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
}

async fn status(State(jobs): State<Client>, Path(id): Path<String>) -> Result<String, StatusCode> {
    let id: JobId = id.parse().map_err(|_| StatusCode::NOT_FOUND)?;
    let job = jobs.get(id).await.map_err(|_| StatusCode::NOT_FOUND)?;
    Ok(job.status.to_string())
}

fn router(jobs: Client) -> Router {
    Router::new().route("/signups", post(sign_up)).route("/signups/{id}", get(status)).with_state(jobs)
}

/// Serves until `stop` comes, then lets requests and jobs under way finish.
async fn serve(
    listener: TcpListener,
    jobs: Client,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Box<dyn std::error::Error>> {
    let worker = Worker::builder(jobs.clone()).register::<Welcome>().build()?.start().await?;
    axum::serve(listener, router(jobs)).with_graceful_shutdown(stop).await?;
    // After the server: what its last requests enqueued, another process will run.
    worker.stop().await;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let jobs = Client::connect("sqlite::memory:").await?;
    jobs.migrate().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = serve(listener, jobs, async move { stopped.await.unwrap_or_default() });

    let visiting = async {
        let body = r#"{"to":"ada@example.com"}"#;
        let id = ask(address, "POST", "/signups", body).await?;
        assert_eq!(ask(address, "POST", "/signups", body).await?, id, "the same request, the same job");
        while ask(address, "GET", &format!("/signups/{id}"), "").await? != "succeeded" {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        stop.send(()).map_err(|()| "the server is gone".into())
    };
    tokio::try_join!(serving, visiting)?;
    Ok(())
}

/// A visitor: one request, and the body of its answer.
async fn ask(
    address: std::net::SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Result<String, Box<dyn std::error::Error>> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json";
    let request =
        format!("{method} {path} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).ok_or("no answer")?)
}
