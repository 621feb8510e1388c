"""Model builders: functions that return a new, uncompiled `keras.Model` and keep nothing.

All of them classify, return logits of shape `(batch, num_classes)`, and take the precision as a
Keras dtype policy, which goes to each layer, so that models of different precision live in one
process. Without one the layers follow Keras's global policy.
"""

from tfdist.models.cnn import cnn
from tfdist.models.mlp import mlp
from tfdist.models.resnet import resnet18

__all__ = ["cnn", "mlp", "resnet18"]
