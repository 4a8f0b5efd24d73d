//! The memory of a request that is held: what the process grows by when so many wait for a model that never comes.
//!
//! Their clients are plain sockets in the same process that keep nothing; what a connection costs the kernel is not
//! counted.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::subjects::World;

const GOAL_BYTES: usize = 16 << 10;
/// The allocator's own beginnings are not the requests'.
const WARM_UP: usize = 500;

pub(crate) fn run(runtime: &Runtime, world: &World, count: usize) {
    runtime.block_on(async {
        drop(hold(world, WARM_UP, "warm-up", false).await);
        until(world, 0).await;
        println!("memory of held requests (goal <= {} KiB + body)", GOAL_BYTES >> 10);
        // The second kind comes on top of the first: memory that was given back would be taken again unseen.
        let mut clients = Vec::new();
        for (what, stream) in [("whole answers", false), ("streams", true)] {
            let (before, there) = (rss(), clients.len());
            clients.extend(hold(world, count, "x", stream).await);
            let more = clients.len() - there;
            let each = rss().saturating_sub(before) / more.max(1);
            println!("{more:>8} held, {what:<14} {:>6.1} KiB each", each as f64 / 1024.0);
        }
        drop(clients);
        until(world, 0).await;
    });
}

async fn hold(world: &World, count: usize, text: &str, stream: bool) -> Vec<TcpStream> {
    let address = world.router.strip_prefix("http://").unwrap();
    let body =
        format!(r#"{{"model":"cold","stream":{stream},"messages":[{{"role":"user","content":"{text}"}}]}}"#);
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let before = held(world);
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        let Ok(mut client) = TcpStream::connect(address).await else { break };
        client.write_all(request.as_bytes()).await.unwrap();
        clients.push(client);
    }
    until(world, before + clients.len()).await;
    clients
}

fn held(world: &World) -> usize {
    let families = world.metrics.gather();
    let gauge = families.iter().find(|f| f.name() == "pilotlight_router_held_requests");
    gauge.and_then(|f| f.get_metric().first()).map_or(0, |m| m.get_gauge().get_value() as usize)
}

/// Until so many are held.
async fn until(world: &World, count: usize) {
    while held(world) != count {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Resident memory of this process, in bytes.
fn rss() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}
