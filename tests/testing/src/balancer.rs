//! A TCP load balancer on loopback, as a Service in front of replicas is: each connection goes to the next target that accepts
//! it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{AbortHandle, JoinSet},
};

/// A load balancer. Belongs to the tokio executor that started it, and ends with all connections when dropped.
#[derive(Debug)]
pub struct Balancer {
    address: SocketAddr,
    targets: watch::Sender<Vec<SocketAddr>>,
    task: AbortHandle,
}

impl Balancer {
    /// Listens on a port of 127.0.0.1, without any target.
    ///
    /// # Errors
    /// If the port cannot be bound.
    pub async fn start(port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        let address = listener.local_addr()?;
        let (targets, receiver) = watch::channel(Vec::new());
        let task = tokio::spawn(accept(listener, receiver)).abort_handle();
        Ok(Self { address, targets, task })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Replaces the targets of new connections. Established ones stay.
    pub fn set_targets(&self, targets: Vec<SocketAddr>) {
        self.targets.send_replace(targets);
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, targets: watch::Receiver<Vec<SocketAddr>>) {
    let mut connections = JoinSet::new();
    let next = Arc::<AtomicUsize>::default();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                let targets = targets.borrow().clone();
                let first = next.fetch_add(1, Ordering::Relaxed);
                connections.spawn(pass(client, targets, first));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn pass(mut client: TcpStream, targets: Vec<SocketAddr>, first: usize) {
    for at in 0..targets.len() {
        if let Ok(mut server) = TcpStream::connect(targets[(first + at) % targets.len()]).await {
            // An error is the end of one of the two sides, which ends the other.
            let _ = copy_bidirectional(&mut client, &mut server).await;
            return;
        }
    }
}
