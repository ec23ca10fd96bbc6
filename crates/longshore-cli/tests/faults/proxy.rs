//! A way to the database that can be cut: what is under way stays under way, and
//! nothing is answered, as when a cable is pulled.

use std::str::FromStr;

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub(crate) struct Proxy {
    pub(crate) url: String,
    cut: watch::Sender<bool>,
}

impl Proxy {
    pub(crate) async fn start(url: &str) -> Self {
        // Our own parameters are none of the driver's.
        let plain = url.split('?').next().unwrap();
        let options = PgConnectOptions::from_str(plain).unwrap();
        let server = format!("{}:{}", options.get_host(), options.get_port());
        assert!(url.contains(&server), "the test database's URL names a host and a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = listener.local_addr().unwrap().to_string();
        let cut = watch::Sender::new(false);
        tokio::spawn(accept(listener, server.clone(), cut.clone()));
        Proxy { url: url.replacen(&server, &here, 1), cut }
    }

    pub(crate) fn block(&self) {
        self.cut.send_replace(true);
    }

    pub(crate) fn unblock(&self) {
        self.cut.send_replace(false);
    }
}

async fn accept(listener: TcpListener, server: String, cut: watch::Sender<bool>) {
    while let Ok((near, _)) = listener.accept().await {
        let (server, cut) = (server.clone(), cut.clone());
        tokio::spawn(async move {
            let Ok(far) = TcpStream::connect(server).await else { return };
            let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
            tokio::spawn(forward(from_near, to_far, cut.subscribe()));
            forward(from_far, to_near, cut.subscribe()).await;
        });
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut cut: watch::Receiver<bool>) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if cut.wait_for(|cut| !*cut).await.is_err() || to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
