"""All errors that eventjet raises, one class for each case that a caller handles differently.

Each error sets attributes and forms its message in the constructor; the last sentence says what to do. An application's
own errors pass through eventjet unchanged. docs/reference/errors.md draws their tree, and says when each is raised and
what to do about it.
"""

from eventjet.errors.base import ComponentFailed as ComponentFailed
from eventjet.errors.base import ComponentMissing as ComponentMissing
from eventjet.errors.base import DefinitionError as DefinitionError
from eventjet.errors.base import DemoFailed as DemoFailed
from eventjet.errors.base import DepsUnusable as DepsUnusable
from eventjet.errors.base import EventjetError as EventjetError
from eventjet.errors.base import UnexpectedExit as UnexpectedExit
from eventjet.errors.base import Unreachable as Unreachable
from eventjet.errors.base import UsageError as UsageError
from eventjet.errors.projection import ArchiveBroken as ArchiveBroken
from eventjet.errors.projection import CheckpointFenced as CheckpointFenced
from eventjet.errors.projection import HandlerFailed as HandlerFailed
from eventjet.errors.projection import LakeFenced as LakeFenced
from eventjet.errors.projection import LakeRefused as LakeRefused
from eventjet.errors.projection import LocationTaken as LocationTaken
from eventjet.errors.projection import LogRolledBack as LogRolledBack
from eventjet.errors.projection import NotCaughtUp as NotCaughtUp
from eventjet.errors.projection import ProjectionError as ProjectionError
from eventjet.errors.projection import ProjectionStopped as ProjectionStopped
from eventjet.errors.projection import PromotionRefused as PromotionRefused
from eventjet.errors.projection import RebuildError as RebuildError
from eventjet.errors.projection import RebuildOvertaken as RebuildOvertaken
from eventjet.errors.projection import RebuildRefused as RebuildRefused
from eventjet.errors.projection import RowRefused as RowRefused
from eventjet.errors.projection import RowsRefused as RowsRefused
from eventjet.errors.projection import RowUnreadable as RowUnreadable
from eventjet.errors.projection import TableLost as TableLost
from eventjet.errors.projection import VerificationFailed as VerificationFailed
from eventjet.errors.reaction import CommandFailed as CommandFailed
from eventjet.errors.reaction import CursorDamaged as CursorDamaged
from eventjet.errors.reaction import CursorFenced as CursorFenced
from eventjet.errors.reaction import CursorMissing as CursorMissing
from eventjet.errors.reaction import HandlerBlocked as HandlerBlocked
from eventjet.errors.reaction import NobodyServes as NobodyServes
from eventjet.errors.reaction import NotSettled as NotSettled
from eventjet.errors.reaction import ReactionError as ReactionError
from eventjet.errors.reaction import ReactionFailed as ReactionFailed
from eventjet.errors.store import ApiRefused as ApiRefused
from eventjet.errors.store import BlobDamaged as BlobDamaged
from eventjet.errors.store import BlobMissing as BlobMissing
from eventjet.errors.store import CodecError as CodecError
from eventjet.errors.store import CommandReused as CommandReused
from eventjet.errors.store import ConcurrencyConflict as ConcurrencyConflict
from eventjet.errors.store import ConnectionClosed as ConnectionClosed
from eventjet.errors.store import ConnectionLost as ConnectionLost
from eventjet.errors.store import DeliveryGap as DeliveryGap
from eventjet.errors.store import Evicted as Evicted
from eventjet.errors.store import Forbidden as Forbidden
from eventjet.errors.store import HistoryBroken as HistoryBroken
from eventjet.errors.store import IdentityLost as IdentityLost
from eventjet.errors.store import LogDrifted as LogDrifted
from eventjet.errors.store import LogIncomplete as LogIncomplete
from eventjet.errors.store import LogReplaced as LogReplaced
from eventjet.errors.store import LogUnusable as LogUnusable
from eventjet.errors.store import NoResponders as NoResponders
from eventjet.errors.store import NotUnique as NotUnique
from eventjet.errors.store import OutcomeUnknown as OutcomeUnknown
from eventjet.errors.store import Refused as Refused
from eventjet.errors.store import SaveTorn as SaveTorn
from eventjet.errors.store import SingleResponse as SingleResponse
from eventjet.errors.store import StoreError as StoreError
from eventjet.errors.store import StoreUnavailable as StoreUnavailable
from eventjet.errors.store import StreamFull as StreamFull
from eventjet.errors.store import StreamMissing as StreamMissing
from eventjet.errors.store import Unauthorized as Unauthorized
from eventjet.errors.store import UndecodableEvent as UndecodableEvent
from eventjet.errors.store import UndecodableMessage as UndecodableMessage
from eventjet.errors.store import UnencodableEvent as UnencodableEvent
from eventjet.errors.store import UniqueNotBuilt as UniqueNotBuilt
from eventjet.errors.store import UnknownAggregate as UnknownAggregate
from eventjet.errors.store import UnknownEvent as UnknownEvent
