//! At the top, and down again: serving, and draining.

use std::time::Duration;

use pilotlight_domain::Phase;
use pilotlight_domain::replica::Event;

use super::super::bench::{self, Bench};
use super::super::face::{Place, View};
use super::super::order::Goal;
use super::{Held, HeldKind, ReplicaTask, Step, loaded};

/// However far away the deadline is: the clock of who wrote it may have been set since.
const DRAIN_MAX: Duration = Duration::from_secs(3600);
/// Sessions that were cut tell their routers and are gone within this.
const CUT_MAX: Duration = Duration::from_secs(5);

impl ReplicaTask {
    /// Into the pool, if need be, and onto workers; serves until another step is next, or it cannot.
    pub(super) async fn serve(&mut self) {
        if self.held.kind() != HeldKind::Seated && !self.take_seats().await {
            return;
        }
        self.pin();
        let holding = self.held.holding();
        loop {
            let (Goal::Serve(target), Held::Seated(_, bench)) = (&self.talk.order.goal, &mut self.held)
            else {
                return;
            };
            let target = *target;
            if let Err(failure) = bench.arrange(target, self.face.cpu_wished()) {
                if let Held::Seated(disk, bench) = self.held.take() {
                    bench.end().await;
                    self.load_failed(disk, failure).await;
                }
                return;
            }
            self.show_places();
            let Held::Seated(_, bench) = &mut self.held else { return };
            bench.sweep();
            tokio::select! {
                () = bench.changed() => {}
                superseded = self.talk.heard(&holding, Step::Serve) => if superseded { return },
            }
        }
    }

    async fn take_seats(&mut self) -> bool {
        let Some(need) = self.held.on_disk().map(|disk| self.kv_need(disk)) else { return false };
        let Some((disk, admission)) = self.admit(Some(need), Step::Serve).await else { return false };
        let settings = bench::Settings {
            node: self.node.clone(),
            copy: admission.copy,
            need,
            kv: admission.kv,
            folder: self.node.disk.path(disk.lease.digest()),
            context_tokens_max: self.talk.order.context_tokens_max,
        };
        self.held = Held::Seated(disk, Box::new(Bench::new(settings)));
        true
    }

    /// Says to sessions and to the cluster where it serves now.
    pub(super) fn show_places(&mut self) {
        let (Goal::Serve(target), Held::Seated(_, bench)) = (&self.talk.order.goal, &self.held) else {
            return;
        };
        let places = bench.places(*target);
        let (filled, bytes) = (bench.filled(), bench.bytes());
        let on: Vec<_> = places.iter().filter_map(Place::ready).cloned().collect();
        self.face.turn(match (&on[..], filled.end) {
            ([_, ..], _) => None,
            ([], None) => Some(Phase::Read),
            // What is left when every byte is in the pool: the copy to the device, where there is one.
            ([], Some(_)) if places.iter().all(|place| place.home) && target.is_accelerator() => {
                Some(Phase::Copy)
            }
            ([], Some(_)) => Some(Phase::Warm),
        });
        let changed = self.serves_on != on.iter().map(|s| s.worker.device).collect::<Vec<_>>();
        self.talk.view.send_replace(View::Open(places));
        if on.is_empty() {
            self.talk.tell(loaded(filled.bytes, bytes), |_| {});
        } else {
            self.fetched = false;
            let slots = on.iter().map(|serving| serving.slots).max().unwrap_or_default();
            let devices: Vec<String> = on.iter().map(|serving| serving.worker.device.to_owned()).collect();
            self.talk.tell(Event::Held, move |status| {
                (status.serving_on, status.slots) = (devices, slots);
                status.moved(status.bytes_total, status.bytes_total);
            });
        }
        if changed {
            self.serves_on = on.iter().map(|serving| serving.worker.device).collect();
            let order = &self.talk.order;
            tracing::info!(replica = order.object, model = %order.model, on = ?self.serves_on, "serves");
            self.node.board.changed();
        }
    }

    /// Lets sessions end, at most until the deadline, then takes the model off its workers. The copy stays in the
    /// pool until somebody needs the room.
    pub(super) async fn drain(&mut self) {
        let now = self.node.clock.now();
        let order = &self.talk.order;
        let deadline = order.drain_deadline.unwrap_or(now + self.node.limits.drain_default);
        self.talk.tell(Event::Drain { deadline }, |_| {});
        let holding = self.held.holding();
        if let Held::Seated(_, bench) = &self.held {
            let (cut, face) = (bench.cut.clone(), self.face.clone());
            tokio::select! {
                () = face.empty() => {}
                () = self.talk.until_superseded(&holding, Step::Drain) => return,
                () = tokio::time::sleep(deadline.since(now).min(DRAIN_MAX)) => {
                    tracing::warn!(replica = self.talk.order.object, open = face.open(), "drain deadline: sessions are cut");
                    cut.cancel();
                    if tokio::time::timeout(CUT_MAX, face.empty()).await.is_err() {
                        tracing::error!(open = face.open(), "sessions that were cut are still there");
                    }
                }
            }
        }
        match self.held.take() {
            Held::Seated(disk, bench) => {
                bench.end().await;
                self.serves_on.clear();
                self.held = Held::Disk(disk);
                tracing::info!(
                    replica = self.talk.order.object,
                    "unloaded; its copy stays in host memory while there is room"
                );
            }
            other => self.held = other,
        }
    }
}
