//! A web service that enqueues jobs and runs them in the same process.

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

/// Responds as soon as the job is stored.
async fn sign_up(State(jobs): State<Client>, Json(welcome): Json<Welcome>) -> Result<String, StatusCode> {
    let key = format!("welcome:{}", welcome.to); // a repeated request creates no second job
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

/// Serves until `stop` resolves, then lets requests and running jobs finish.
async fn serve(
    listener: TcpListener,
    jobs: Client,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Box<dyn std::error::Error>> {
    let worker = Worker::builder(jobs.clone()).register::<Welcome>().build()?.start().await?;
    axum::serve(listener, router(jobs)).with_graceful_shutdown(stop).await?;
    // Stop the worker after the server. Jobs it has not started stay queued for another process.
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

    let calling = async {
        let body = r#"{"to":"ada@example.com"}"#;
        let id = send(address, "POST", "/signups", body).await?;
        assert_eq!(
            send(address, "POST", "/signups", body).await?,
            id,
            "a repeated request returns the same job"
        );
        while send(address, "GET", &format!("/signups/{id}"), "").await? != "succeeded" {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        stop.send(()).map_err(|()| "the server has stopped".into())
    };
    tokio::try_join!(serving, calling)?;
    Ok(())
}

/// Sends one HTTP request and returns the body of the response.
async fn send(
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
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).ok_or("no response")?)
}
