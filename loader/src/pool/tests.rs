//! The book against a model of itself, and the types against the book.

use proptest::prelude::*;

use super::book::ChunkState;
use super::*;

const CHUNK: ByteCount = ByteCount::from_kib(64);

fn pool(chunks: u64) -> Arc<HostPool> {
    HostPool::create(ByteCount::new(CHUNK.get() * chunks), CHUNK).unwrap()
}

#[test]
fn a_chunk_goes_its_way_and_comes_back() {
    let pool = pool(2);
    let free = pool.take(2).unwrap();
    assert!(matches!(pool.take(1), Err(PoolError::Full { wanted: 1, free: 0, total: 2 })));
    let mut chunks = free.into_iter();
    let mut filling = chunks.next().unwrap().fill();
    filling.bytes_mut()[..3].copy_from_slice(b"abc");
    let resident = filling.publish(3);
    assert_eq!(resident.bytes(), b"abc");
    let lease = resident.lease();
    let resident = resident.evict().unwrap_err();
    assert_eq!(resident.leases(), 1);
    drop(chunks);
    assert_eq!(pool.chunks_free(), 1);
    drop(resident);
    assert_eq!((pool.chunks_free(), lease.bytes()), (1, b"abc".as_slice()), "leased, though given up");
    drop(lease);
    assert_eq!(pool.chunks_free(), 2);
    let resident = pool.take(1).unwrap().remove(0).fill().publish(1);
    drop(resident.evict().unwrap());
    assert_eq!(pool.chunks_free(), 2);
}

#[test]
fn blocks_are_the_chunk_and_return_it() {
    let pool = pool(1);
    let blocks = pool.take(1).unwrap().remove(0).fill().into_blocks(40_000, 16 << 10);
    assert_eq!(blocks.iter().map(Block::len).collect::<Vec<_>>(), [16384, 16384, 7232]);
    let mut chunk = None;
    for (i, mut block) in blocks.into_iter().enumerate() {
        assert!(chunk.is_none());
        block.bytes_mut().fill(i as u8 + 1);
        chunk = block.finish();
    }
    let chunk = chunk.expect("the last block gives the chunk back");
    assert_eq!([chunk.bytes()[0], chunk.bytes()[16384], chunk.bytes()[39_999]], [1, 2, 3]);
    drop(chunk);
    assert_eq!(pool.chunks_free(), 1);
    let mut blocks = pool.take(1).unwrap().remove(0).fill().into_blocks(40_000, 16 << 10);
    blocks.pop();
    assert_eq!(pool.chunks_free(), 0);
    drop(blocks);
    assert_eq!(pool.chunks_free(), 1, "dropped half-way");
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let size = |bytes: u64, chunk: u64| HostPool::create(ByteCount::new(bytes), ByteCount::new(chunk));
    for (bytes, chunk) in [(0, 4096), (4096, 0), (4096, 100), (4095, 4096)] {
        assert!(matches!(size(bytes, chunk), Err(PoolError::Size { .. })), "{bytes} {chunk}");
    }
    let error = size(1 << 60, 8 << 20).unwrap_err().to_string();
    assert!(error.contains("1048576TiB of host memory") && error.contains("--host-memory"), "{error}");
}

#[test]
fn huge_pages_are_asked_for_and_what_came_is_said() {
    let chunk = ByteCount::from_mib(2);
    let pool = HostPool::create(ByteCount::from_mib(8), chunk).unwrap();
    assert_eq!(pool.prefault(2, &CancelFlag::new()), 0);
    // Which kind depends on the machine; that it is known and described does not.
    assert_eq!(pool.page_kind_now(), pool.page_kind());
    assert!(!pool.page_kind().describe().is_empty());
    let small = HostPool::create(ByteCount::from_kib(64), ByteCount::from_kib(4)).unwrap();
    assert_eq!(small.page_kind(), PageKind::Small);
}

#[test]
fn prefaulting_changes_no_byte() {
    let pool = HostPool::create(ByteCount::from_mib(8), ByteCount::from_mib(2)).unwrap();
    let mut filling = pool.take(4).unwrap().pop().unwrap().fill();
    filling.bytes_mut().fill(0xa5);
    pool.prefault(2, &CancelFlag::new());
    assert!(filling.bytes().iter().all(|&b| b == 0xa5));
    pool.prefault_in_background(CancelFlag::new()).unwrap();
}

/// What one can try on a chunk.
#[derive(Clone, Copy, Debug)]
enum Move {
    Take,
    GiveBack,
    Fill,
    Discard,
    Publish,
    Lease,
    Release,
    Evict,
    Retire,
}

fn moves() -> impl Strategy<Value = Vec<(Move, u32)>> {
    let one = prop_oneof![
        Just(Move::Take),
        Just(Move::GiveBack),
        Just(Move::Fill),
        Just(Move::Discard),
        Just(Move::Publish),
        Just(Move::Lease),
        Just(Move::Release),
        Just(Move::Evict),
        Just(Move::Retire)
    ];
    proptest::collection::vec((one, 0u32..3), 0..200)
}

/// The table of legal moves, written a second time.
fn expected(state: ChunkState, m: Move) -> Option<ChunkState> {
    use ChunkState::{Doomed, Empty, Filling, Resident, Taken};
    Some(match (m, state) {
        (Move::GiveBack, Taken | Filling) => Empty,
        (Move::Fill, Taken) => Filling,
        (Move::Discard, Filling) => Taken,
        (Move::Publish, Filling) => Resident(0),
        (Move::Lease, Resident(n)) => Resident(n + 1),
        (Move::Release, Resident(n)) if n > 0 => Resident(n - 1),
        (Move::Release, Doomed(1)) => Empty,
        (Move::Release, Doomed(n)) => Doomed(n - 1),
        (Move::Evict, Resident(0)) => Taken,
        (Move::Retire, Resident(0)) => Empty,
        (Move::Retire, Resident(n)) => Doomed(n),
        _ => return None,
    })
}

proptest! {
    #[test]
    fn the_book_keeps_its_table(moves in moves()) {
        let mut book = Book::new(3);
        for (m, chunk) in moves {
            let before = book.state(chunk);
            if let Move::Take = m {
                let free = book.free();
                match book.take(1) {
                    Some(taken) => prop_assert_eq!(book.state(taken[0]), ChunkState::Taken),
                    None => prop_assert_eq!(free, 0),
                }
            } else {
                let result = match m {
                    Move::GiveBack => book.give_back(chunk),
                    Move::Fill => book.fill(chunk),
                    Move::Discard => book.empty(chunk),
                    Move::Publish => book.publish(chunk),
                    Move::Lease => book.lease(chunk),
                    Move::Release => book.release(chunk),
                    Move::Evict => book.evict(chunk),
                    Move::Retire | Move::Take => book.retire(chunk),
                };
                match expected(before, m) {
                    Some(next) => prop_assert_eq!((result, book.state(chunk)), (Ok(()), next)),
                    None => prop_assert_eq!((result, book.state(chunk)), (Err(Refused(before)), before)),
                }
            }
            let empty = (0..3).filter(|&c| book.state(c) == ChunkState::Empty).count();
            prop_assert_eq!(book.free() as usize, empty, "free is what is empty");
        }
    }
}
