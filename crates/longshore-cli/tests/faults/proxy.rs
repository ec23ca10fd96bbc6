//! A TCP proxy in front of the database that can stop forwarding. Connections stay
//! open and nothing arrives, as when a network cable is pulled.

use std::str::FromStr;

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub(crate) struct Proxy {
    /// The database's URL by way of the proxy.
    pub(crate) url: String,
    blocked: watch::Sender<bool>,
    /// The host and port of the server that new connections go to.
    server: watch::Sender<String>,
}

impl Proxy {
    pub(crate) async fn start(url: &str) -> Self {
        // The driver does not understand Longshore's own parameters.
        let without_parameters = url.split('?').next().unwrap();
        let options = PgConnectOptions::from_str(without_parameters).unwrap();
        let server = format!("{}:{}", options.get_host(), options.get_port());
        assert!(url.contains(&server), "the test database's URL has a host and a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let url = url.replacen(&server, &address, 1);
        let (blocked, server) = (watch::Sender::new(false), watch::Sender::new(server));
        tokio::spawn(accept(listener, server.clone(), blocked.clone()));
        Proxy { url, blocked, server }
    }

    /// Sends new connections to another server on this host. Open ones stay where they
    /// are.
    pub(crate) fn switch_to(&self, port: u16) {
        self.server.send_replace(format!("127.0.0.1:{port}"));
    }

    pub(crate) fn block(&self) {
        self.blocked.send_replace(true);
    }

    pub(crate) fn unblock(&self) {
        self.blocked.send_replace(false);
    }
}

async fn accept(listener: TcpListener, server: watch::Sender<String>, blocked: watch::Sender<bool>) {
    while let Ok((client, _)) = listener.accept().await {
        let (server, blocked) = (server.borrow().clone(), blocked.clone());
        tokio::spawn(async move {
            let Ok(server) = TcpStream::connect(server).await else { return };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::spawn(forward(from_client, to_server, blocked.subscribe()));
            forward(from_server, to_client, blocked.subscribe()).await;
        });
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut blocked: watch::Receiver<bool>) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if blocked.wait_for(|blocked| !*blocked).await.is_err()
            || to.write_all(&buffer[..read]).await.is_err()
        {
            return;
        }
    }
}
