//! Which process has opened a connection over loopback.

use std::fs;

/// Ports of a connection over loopback: that of its client, and that of the proxy. The first one alone may belong to several
/// connections, each to another server.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ports {
    pub(super) from: u16,
    pub(super) to: u16,
}

/// Returns true if a process has the client's socket of a connection (proc(5): `net/tcp` and `fd`).
pub(super) fn has_opened(process: u32, ports: Ports) -> bool {
    let table = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let from = format!(":{:04X}", ports.from);
    let to = format!(":{:04X}", ports.to);
    let sockets = table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let local = fields.nth(1)?;
        let remote = fields.next()?;
        let inode = fields.nth(6)?;
        (local.ends_with(&from) && remote.ends_with(&to)).then(|| format!("socket:[{inode}]"))
    });
    let sockets: Vec<_> = sockets.collect();
    let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut links = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|link| sockets.iter().any(|socket| link.as_os_str() == socket.as_str()))
}
